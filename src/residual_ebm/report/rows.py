"""The rows of a run's table and what stands around them, as text: for a terminal and for pages."""

from typing import Any, NamedTuple

from residual_ebm.files.source_commit import short_commit

HEADINGS = ("model", "params", "val", "test", "95 %", "minus base", "ESS", "flags")
FLAGGED = " ⚠"  # after the name of a model whose estimate has flags
_SHOWN_OF_A_PREFIX = 240  # characters


class TableRow(NamedTuple):
    cells: list[str]
    is_best: bool  # the energy that was chosen on validation


def table_rows(results: dict[str, Any]) -> list[TableRow]:
    """Language models, joint models, and the truth where it is known."""
    rows = [
        TableRow(_exact_cells(row["name"], count_text(row["parameters"]), row), False)
        for row in results["language_models"]
    ]
    best = best_row(results)
    for row in results["joint_models"]:
        test = row["test"]
        cells = [
            marked_name(row),
            count_text(row["parameters"]),
            bounds_text(row["validation"]),
            bounds_text(test),
            interval_text(test["published"]),
            signed_text(test["difference_from_base"]),
            effective_text(test),
            str(len(test["flags"]) or "-"),
        ]
        rows.append(TableRow(cells, row == best))
    if all(results["floor"].values()):
        rows.append(TableRow(_exact_cells("truth", "", results["floor"]), False))
    return rows


def best_row(results: dict[str, Any]) -> dict[str, Any] | None:
    """The joint model of the energy that was chosen on validation, as trained; None without one."""
    for row in results["joint_models"]:
        if row["energy"] == results["best_energy"] and not row["scaled"]:
            return dict(row)
    return None


def base_perplexity(results: dict[str, Any], row: dict[str, Any]) -> float:
    """The test perplexity of the language model that a joint model stands on."""
    (value,) = (
        one["test"]["value"]
        for one in results["language_models"]
        if one["name"] == row["language_model"]
    )
    return float(value)


def marked_name(row: dict[str, Any]) -> str:
    """A joint model's name; a flag is seen where the name is, however wide the table."""
    return f"{row['name']}{FLAGGED if row['test']['flags'] else ''}"


def effective_text(test: dict[str, Any]) -> str:
    """Effective samples of the median prefix; of older results only the mean is known."""
    median = test.get("median_effective_sample_size")
    return f"mean {test['effective_sample_size']:.0f}" if median is None else f"{median:.0f}"


def gap_text(
    language_model: str,
    energy: str,
    gap: float,
    interval: dict[str, float | None],
) -> str:
    """The estimate of a lower bound; it is called one only where its interval is above 0."""
    low, high = interval["low"], interval["high"]
    if low is None or high is None:
        shown = f"estimate {gap:+.3f} nats a passage, its interval unknown: one document"
        found = f"No gap between {language_model} and the test text that is certain ({shown})"
    elif low <= 0:
        shown = f"estimate {gap:+.3f} nats a passage, 95 % {low:+.3f} to {high:+.3f}"
        found = f"No gap between {language_model} and the test text that is certain ({shown})"
    else:
        shown = f"estimate {gap:.3f}, 95 % {low:.3f} to {high:.3f}"
        found = f"{language_model} is at least {low:.3f} nats a passage away from the test text"
        found += f" ({shown})"
    return f"{found}, by the energy {energy}: a lower bound on KL(data || P_LM)."


def _exact_cells(name: str, parameters: str, row: dict[str, Any]) -> list[str]:
    values = (number_text(row["validation"]["value"]), number_text(row["test"]["value"]))
    return [name, parameters, *values, interval_text(row["test"]["published"]), "", "", ""]


def caption_text(results: dict[str, Any]) -> str:
    counts = results["num_prefixes"]
    bases = dict.fromkeys(row["language_model"] for row in results["joint_models"])
    return (
        f"Perplexity of the {results['block_length'] - results['prefix_length']} tokens after a"
        f" prefix of {results['prefix_length']} ({results['continuation']} continuations), on"
        f" {counts['validation']} validation and {counts['test']} test prefixes. Joint models:"
        f" lower to upper bound from n = {results['num_samples']} proposals a prefix; x1.2 means"
        " that the energy is scaled by a factor fitted on validation. 95 %: bootstrap over"
        " documents, from the lower bound's 2.5 % to the upper bound's 97.5 %; minus base: the same"
        f" for the upper bound minus the language model below it ({', '.join(bases)}), paired. ESS:"
        " effective sample size of those n for the median prefix."
        f"{FLAGGED}: flagged, not to be quoted as it stands. k-hat: how heavy the tail of the"
        " weights is; past its threshold a few proposals decide. log Z: 0 where the energy needs no"
        " normalising. Resampled: what is written by keeping one of n + 1 proposals, a model of"
        " its own that needs no estimate of Z; no energy can gain more than log(n + 1) nats a"
        " passage by it."
    )


def pretrained_note(results: dict[str, Any]) -> list[str]:
    """A reservation about every row in which something was learnt elsewhere."""
    if not results["pretrained"]:
        return []
    return [f"{', '.join(results['pretrained'])}: pretrained elsewhere, perhaps on this very text."]


def notes(results: dict[str, Any]) -> list[str]:
    """What a reader should know of the models before the numbers are quoted."""
    found = pretrained_note(results)
    for row in results["language_models"]:
        found.append(
            f"{row['name']}: perplexity {number_text(row['train']['value'])} on training text,"
            f" {number_text(row['test']['value'])} on test text."
        )
    compared = comparison_texts(results)
    return [*found, *compared, *([comparisons_note(results)] if compared else [])]


def flagged_models(results: dict[str, Any]) -> set[str]:
    """Names of joint models whose test estimate has a flag."""
    return {row["name"] for row in results["joint_models"] if row["test"]["flags"]}


def comparison_texts(results: dict[str, Any]) -> list[str]:
    """For each model but the first, on which side of those above it it lies; nothing for results
    that were made before models were compared."""
    relations: dict[str, dict[str, list[str]]] = {}
    marks = dict.fromkeys(flagged_models(results), FLAGGED)
    for found in results.get("comparisons", []):
        interval = found["difference"]
        if interval["low"] is None or interval["low"] <= 0 <= interval["high"]:
            relation = "undecided against"
        else:
            relation = "lower than" if interval["high"] < 0 else "higher than"
        other = found["other"] + marks.get(found["other"], "")
        relations.setdefault(found["model"], {}).setdefault(relation, []).append(other)
    return [
        f"{model}{marks.get(model, '')}: perplexity "
        + "; ".join(f"{relation} {', '.join(others)}" for relation, others in against.items())
        + "."
        for model, against in relations.items()
    ]


def comparisons_note(results: dict[str, Any]) -> str:
    count = len(results["comparisons"])
    wrong = f"; with {count} of them, about one in twenty would be wrong by chance alone"
    return (
        "Lower or higher: so by the 95 % interval of the paired difference over documents, each"
        f" taken by itself{wrong if count > 1 else ''}. Of a flagged model ({FLAGGED.strip()}) the"
        " interval knows nothing of what its samples missed."
    )


def estimate_text(row: dict[str, Any]) -> str:
    """How a joint model's estimate stands, beside its bounds."""
    test = row["test"]
    bounds = ", ".join(f"{bounds_text(at)} at n = {at['num_samples']}" for at in test["bounds_at"])
    return (
        f"{row['name']}: {bounds}; log Z {test['log_partition_mean']:+.3f} ±"
        f" {test['log_partition_spread']:.3f} over prefixes; k-hat past its threshold for"
        f" {test['share_past_pareto_k']:.0%}; real text outweighs all proposals for"
        f" {test['share_outweighed']:.0%}.{resampled_text(test)}"
    )


def resampled_text(test: dict[str, Any]) -> str:
    """What the sampler writes, which needs no reservation; nothing for results made before."""
    if "resampled" not in test:
        return ""
    return (
        f" Resampled from {test['bounds_at'][-1]['num_samples'] + 1} proposals:"
        f" {number_text(test['resampled'])} or lower ({signed_text(test['resampled_difference'])}"
        " against its language model), whatever the flags."
    )


def one_line(text: str) -> str:
    """Paragraphs one after the other: a line break in a sample is not one of the page's."""
    paragraphs = (" ".join(line.split()) for line in text.split("\n"))
    return " ¶ ".join(paragraph for paragraph in paragraphs if paragraph)


def tail_text(text: str) -> str:
    """The end of a prefix is what a continuation follows; results.json has all of it."""
    words = one_line(text)
    if len(words) <= _SHOWN_OF_A_PREFIX:
        return words
    return "... " + words[-_SHOWN_OF_A_PREFIX:].partition(" ")[2]


def count_text(value: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return str(value)


def number_text(value: float | None) -> str:
    if value is None:
        return "?"
    digits = 2 if abs(value) < 1000 else 0
    return f"{value:.{digits}f}"


def bounds_text(row: dict[str, Any]) -> str:
    return f"{number_text(row['lower'])}-{number_text(row['upper'])}"


def interval_text(interval: dict[str, float | None]) -> str:
    if interval["low"] is None or interval["high"] is None:
        return "one document"
    return f"{number_text(interval['low'])}-{number_text(interval['high'])}"


def signed_text(interval: dict[str, float | None]) -> str:
    if interval["low"] is None or interval["high"] is None:
        return "one document"
    digits = 2 if max(abs(interval["low"]), abs(interval["high"])) < 10 else 1
    return f"{interval['low']:+.{digits}f}/{interval['high']:+.{digits}f}"


def items_seen(row: dict[str, Any], config: dict[str, Any]) -> int:
    """Items that a training saw: steps until its last validation, times the batch size."""
    validations = row["training"].get("validations")
    if not validations or config["training"] is None:
        return 0
    return int(validations[-1]["step"]) * int(config["training"]["batch_size"])


def growth_text(results: dict[str, Any]) -> str:
    """What of the recipe is not as it was when the run began, and what was known by then."""
    texts = []
    for entry in results.get("growth", []):
        seen = "before there was a table"
        if entry["table_by"] is not None:
            seen = f"after a table had been made, by commit {short_commit(entry['table_by'])}"
        by = f" by commit {short_commit(entry['commit'])}" if entry["commit"] else ""
        texts.append(f" The recipe was changed{by}, {seen}: {'; '.join(entry['changes'])}.")
    return "".join(texts)
