"""How far P_LM is from the text: E_data[-E] - log Z is a lower bound on KL(data || P_LM)."""

from typing import Any

from residual_ebm.errors import UserError
from residual_ebm.estimation.perplexity import joint_log_prob
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.storage import check_manifest
from residual_ebm.models.loading import load_tokenizer
from residual_ebm.stages.evaluate import prefixes_of, read_scored, summarise
from residual_ebm.stages.proposals import evaluation_prefixes


def gap_report(run_dir: RunDirectory, energy: str | None, num_passages: int) -> dict[str, Any]:
    """The bound of a finished run, and the test passages where the gap is largest."""
    recipe = run_dir.recipe()
    results = run_dir.read_results()
    check_manifest(run_dir.blocks)
    rows = {row["energy"]: row for row in results["joint_models"] if not row["scaled"]}
    if not rows:
        raise UserError("energies", str(run_dir.path), "this run has none; add one to its recipe")
    energy = energy or str(results["best_energy"])
    if energy not in rows:
        raise UserError("energy", energy, f"not in this run; it has {', '.join(rows)}")
    row = rows[energy]
    real, log_weights = read_scored(run_dir, energy, "test")
    summaries = summarise(real, log_weights, 1.0)
    _, from_upper_P = joint_log_prob(prefixes_of(real), summaries, results["num_samples"])
    gap_P = from_upper_P - real.lm_log_prob_P
    tokenizer = load_tokenizer(str(run_dir.blocks / "tokenizer"), "tokenizer")
    blocks, _ = evaluation_prefixes(recipe, run_dir, "test")
    passages = []
    for number in (-gap_P).argsort(kind="stable")[:num_passages]:
        block = int(real.block_P[number])
        ids, start = blocks.ids_BT[block], recipe.block.prefix_length
        passages.append(
            {
                "block": block,
                "gap": float(gap_P[number]),
                "lm_log_prob": float(real.lm_log_prob_P[number]),
                "prefix": tokenizer.decode(ids[:start]),
                "continuation": tokenizer.decode(ids[start : blocks.length_B[block]]),
            }
        )
    return {
        "energy": energy,
        "language_model": row["language_model"],
        "gap": row["test"]["gap"],
        "interval": row["test"]["gap_interval"],
        "num_prefixes": len(gap_P),
        "num_samples": results["num_samples"],
        "flags": row["test"]["flags"],
        "passages": passages,
    }
