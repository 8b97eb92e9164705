"""What the commands that ask a finished run's models do.

Heavy imports are inside the functions: a wrong option should not wait for torch.
"""

from pathlib import Path
from typing import Any

from residual_ebm.errors import UserError
from residual_ebm.outputs import Output, lines_output
from residual_ebm.progress import TerminalProgress


def generate(
    run: Path,
    energy: str | None,
    prompt: str | None,
    example: int | None,
    num_proposals: int,
    num_tokens: int | None,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    all: bool,
) -> Output:
    from residual_ebm.models.joint import JointModel

    if prompt is None:
        prompt = _example_prefix(run, example)
    joint = JointModel.from_pretrained(run, energy)
    sample = joint.sample(
        prompt,
        num_proposals,
        num_tokens=num_tokens,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        progress=TerminalProgress(),
    )
    data: dict[str, Any] = {
        "text": sample.text,
        "ids": sample.ids_T.tolist(),
        "energy": sample.energy,
        "lm_log_prob": sample.lm_log_prob,
        "effective_sample_size": sample.effective_sample_size,
        "num_proposals": sample.num_proposals,
        "target": sample.target,
        "flags": sample.flags,
    }
    lines = [
        sample.text,
        f"  energy {sample.energy:+.3f}, lm_log_prob {sample.lm_log_prob:.3f}, effective sample"
        f" size {sample.effective_sample_size:.1f} of {num_proposals}, target {sample.target}",
        *(f"  flag: {flag}" for flag in sample.flags),
    ]
    if all:
        data["proposals"] = _scored_set(joint, sample.scored)
        ranked = sorted(data["proposals"], key=lambda entry: entry["energy"])
        lines += [
            f"{entry['energy']:+9.3f} {entry['lm_log_prob']:9.3f}  {entry['text']}"
            for entry in ranked
        ]
    return lines_output(data, lines)


def _example_prefix(run: Path, example: int | None) -> str:
    from residual_ebm.files.run_directory import RunDirectory

    examples = RunDirectory(run).read_results()["examples"]
    if example is None or not 1 <= example <= len(examples):
        raise UserError("--example", example, f"the run has examples 1 to {len(examples)}")
    return str(examples[example - 1]["prefix"])


def _scored_set(joint: Any, scored: Any) -> list[dict[str, Any]]:
    proposals = scored.proposals
    return [
        {
            "text": joint.decode(proposals.ids_NT[number, : proposals.length_N[number]]),
            "energy": float(scored.energy_N[number]),
            "lm_log_prob": float(proposals.log_prob_N[number]),
        }
        for number in range(len(scored.energy_N))
    ]


def score(
    run: Path,
    energy: str | None,
    text: str,
    text_column: str,
    num_samples: int | None,
    seed: int,
) -> Output:
    from residual_ebm.assets.resolve import local_source
    from residual_ebm.files.corpus import read_documents
    from residual_ebm.models.joint import JointModel
    from residual_ebm.stages.evaluate import plain_numbers

    if text.startswith("grammar:"):
        raise UserError("text", text, "is no text to score; name a file or a folder")
    if not (text.startswith(("asset:", "hf:")) or Path(text).expanduser().exists()):
        raise UserError("text", text, "no such file or folder")
    text = local_source(text, "text", TerminalProgress(), kind="corpus")
    try:
        documents = read_documents(text, text_column=text_column).documents
    except UserError as error:
        # The reader speaks of the recipe's fields; here they are arguments.
        argument = {"corpus.path": "text", "corpus.text_column": "--text-column"}
        field = argument.get(error.field, error.field)
        raise UserError(field, error.value, error.remedy) from None
    joint = JointModel.from_pretrained(run, energy)
    texts = [document.text for document in documents]
    blocks = joint.blocks_of(texts)
    lm_log_prob_P, energy_P = joint.score(blocks)
    passages = [
        {
            "document": documents[int(blocks.document_B[number])].name,
            "num_tokens": int(blocks.length_B[number]) - joint.block.prefix_length,
            "lm_log_prob": float(lm_log_prob_P[number]),
            "energy": float(energy_P[number]),
        }
        for number in range(len(blocks))
    ]
    data: dict[str, Any] = {"passages": passages}
    lines = [f"{'lm_log_prob':>12} {'energy':>9}  document"]
    lines += [f"{p['lm_log_prob']:12.3f} {p['energy']:+9.3f}  {p['document']}" for p in passages]
    if num_samples is not None:
        report = joint.perplexity(texts, num_samples, seed=seed, progress=TerminalProgress())
        data["perplexity"] = plain_numbers(report)
        base, estimate = report.base, report.joint
        lines += [
            f"perplexity of {report.num_prefixes} passages: P_LM {base.value:.3f}, joint"
            f" {estimate.lower:.3f}-{estimate.upper:.3f} (n = {num_samples}, effective sample size"
            f" {estimate.effective_sample_size:.0f}); resampled from {num_samples + 1} proposals"
            f" {estimate.resampled:.3f} or lower",
            *(f"  flag: {flag}" for flag in report.flags),
        ]
    return lines_output(data, lines)


def gap(run: Path, energy: str | None, num_passages: int) -> Output:
    from residual_ebm.files.run_directory import RunDirectory
    from residual_ebm.report.rows import gap_text, one_line
    from residual_ebm.stages.gap import gap_report

    if num_passages < 0:
        raise UserError("num_passages", num_passages, "ask for 0 or more")
    data = gap_report(RunDirectory(run), energy, num_passages)
    lines = [
        gap_text(data["language_model"], data["energy"], data["gap"], data["interval"]),
        "E_data[-E] - log Z, each passage counted among its proposals, n ="
        f" {data['num_samples']}, {data['num_prefixes']} passages.",
    ]
    for passage in data["passages"]:
        prefix, continuation = (one_line(passage[part]) for part in ("prefix", "continuation"))
        lines.append(f"{passage['gap']:+8.3f}  {prefix} | {continuation}")
    return lines_output(data, lines)


def next_token(
    run: Path,
    energy: str | None,
    prompt: str,
    num_candidates: int,
    num_samples: int,
    num_shown: int,
    seed: int,
) -> Output:
    import torch

    from residual_ebm.models.joint import JointModel
    from residual_ebm.models.next_token import next_tokens

    for field, value in (("--num-candidates", num_candidates), ("--num-shown", num_shown)):
        if value < 1:
            raise UserError(field, value, "must be at least 1")
    joint = JointModel.from_pretrained(run, energy)
    prefix_ids = joint.encode_prompt(prompt)
    found = next_tokens(
        joint,
        prefix_ids,
        torch.empty(0, dtype=torch.int64),
        num_candidates=num_candidates,
        num_samples=num_samples,
        seed=seed,
        progress=TerminalProgress(),
    )
    chosen = {"base": found.best_of_lm(num_shown), "joint": found.best_of_joint(num_shown)}
    data: dict[str, Any] = {
        model: [
            {"token": token, "text": joint.decode(torch.tensor([token])), "probability": chance}
            for token, chance in best
        ]
        for model, best in chosen.items()
    }
    data["num_samples"] = num_samples
    data["largest_error"] = float(found.error_G.max())
    data["flags"] = joint.prompt_flags(prefix_ids)
    lines = [f"{'rank':>4}  {'language model':24}  {'joint':24}"]
    for rank, pair in enumerate(zip(data["base"], data["joint"], strict=True), start=1):
        cells = [f"{one['probability']:.3f} {one['text']!r:18}" for one in pair]
        lines.append(f"{rank:4}  " + "  ".join(cells))
    lines.append(
        f"{num_samples} completions of each of {len(found.token_G)} candidates; standard error of"
        f" log A at most {data['largest_error']:.3f}."
    )
    lines += [f"  flag: {flag}" for flag in data["flags"]]
    return lines_output(data, lines)
