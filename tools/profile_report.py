"""The report of a profile, for people: a Markdown file next to it with its figures, and the table on the terminal."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvkin.configs.profiles import MeasuredGroup, Profile, ProfilePoint, layer_group
from kvkin.tools.profile_search import stability

HEAD = (
    "layers",
    "group",
    "expected loss",
    "its own loss (95 %)",
    "score",
    "first token agrees",
    "divergence",
    "recompute",
)


def write_report(path: Path, profile: Profile, extra: Mapping[str, Any]) -> list[Path]:
    """Write report and figures next to the profile at ``path``; the files written.

    ``extra``: ``sensitivities`` (cases x layers), ``timed_tokens``, ``seconds`` of the whole run, ``metric``'s title.
    """
    from kvkin.tools.profile_figures import write_figures

    figures = write_figures(path, profile, extra["sensitivities"])
    report = path.with_suffix(".md")
    report.write_text(markdown(profile, extra, {key: file.name for key, file in figures.items()}), encoding="utf-8")
    return [report, *figures.values()]


def markdown(profile: Profile, extra: Mapping[str, Any], figures: Mapping[str, str]) -> str:
    """The report's text."""
    scores, data = profile.scores, profile.data
    lines = [
        f"# {profile.receiver.name} on the KV of {profile.sender.name}",
        "",
        verdict(profile),
        "",
        (
            f"- **Data**: {data.name} (BLAKE2b of the cases {data.digest[:32]}), split {data.split}, {data.samples} cases, contexts of "
            f"{data.context_tokens.min} to {data.context_tokens.max} tokens (median {data.context_tokens.p50})"
        ),
        (
            f"- **Metric**: {extra['metric']}; loss is the share of the full prefill's mean that is lost, on the same cases. Expected: "
            "the losses of all groups, made never to fall as the divergence rises; the choice goes by it"
        ),
        f"- **Full prefill** {_score(scores.full)}; sender alone {_score(scores.sender)}; full reuse {_score(scores.full_reuse)}",
        (
            f"- **Groups** of every {profile.group_size} layers: {len(profile.groups)} measured by divergence, "
            f"{sum(one.quality is not None for one in profile.groups)} by their answers"
        ),
        f"- **Stable over inputs**: each input ranks the layers like the others do, Spearman {stability(extra['sensitivities']):.2f}",
        f"- **Took** {extra['seconds'] / 60:.1f} minutes (this run)",
        "",
        "## Frontier",
        "",
        f"Recompute time: {extra['timed_tokens']} context tokens, median of a few runs.",
        "",
        f"| {' | '.join(HEAD)} |",
        f"|{'---|' * len(HEAD)}",
        *(f"| {' | '.join(row)} |" for row in rows(profile, frontier_only=True)),
        "",
        f"![loss over recomputed layers]({figures['frontier']})",
        "",
        "## Sensitivity of the layers",
        "",
        "Divergence of the answer's distribution if the KV of this one layer is the sender's and all others are the receiver's.",
        "",
        f"![sensitivity by layer]({figures['sensitivity']})",
        "",
        f"![sensitivity of each input]({figures['inputs']})",
        "",
        "## All groups with answers",
        "",
        f"| {' | '.join(HEAD)} |",
        f"|{'---|' * len(HEAD)}",
        *(f"| {' | '.join(row)} |" for row in rows(profile, frontier_only=False)),
    ]
    return "\n".join(lines) + "\n"


def verdict(profile: Profile) -> str:
    """What the profile says, in a sentence or two."""
    bound = f"{profile.max_loss:.0%}"
    if profile.chosen is None:
        return f"No measured group keeps the loss within {bound}: reuse between these two should stay exact."
    share = profile.chosen.layers / profile.num_layers
    if profile.full_reuse_is_fine:
        text = f"Full reuse is fine: with nothing recomputed the loss is {profile.chosen.loss:.1%}, within {bound}."
    else:
        text = (
            f"Recompute {_group(profile.chosen)} ({profile.chosen.layers} of {profile.num_layers} layers, {share:.0%}): "
            f"the loss is {profile.chosen.loss:.1%}, within {bound}."
        )
    own = next(one.quality for one in profile.groups if one.group == profile.chosen.group)
    if own is not None and own.loss_high > profile.max_loss:
        text += (
            f" Its own {own.n} answers do not rule out {own.loss_high:.1%}: more of them (--answer-samples) say more."
        )
    return text


def rows(profile: Profile, *, frontier_only: bool) -> list[list[str]]:
    """Cells of the table, by rising number of layers."""
    frontier = {one.group for one in profile.frontier}
    return [
        _row(one, one.group == (profile.chosen.group if profile.chosen else ()))
        for one in profile.groups
        if one.quality is not None and (one.group in frontier or not frontier_only)
    ]


def summary(profile: Profile) -> str:
    """The frontier as a table for the terminal."""
    table = Table(title=f"{profile.receiver.name} on the KV of {profile.sender.name}", title_justify="left", box=None)
    for column in HEAD:
        table.add_column(column)
    for row in rows(profile, frontier_only=True):
        table.add_row(*(cell.replace("**", "") for cell in row))
    out = io.StringIO()
    console = Console(file=out, width=132)
    console.print(table)
    full, alone = profile.scores.full, profile.scores.sender
    console.print(
        f"full prefill {_score(full)}, sender alone {_score(alone)}, n = {full.n}", markup=False, highlight=False
    )
    console.print(verdict(profile), markup=False, highlight=False)
    return out.getvalue().rstrip("\n")


def _row(one: MeasuredGroup, chosen: bool) -> list[str]:
    assert one.quality is not None
    quality, group = one.quality, layer_group(one.group)
    label = "nothing (full reuse)" if group is None else f"[{group.start}, {group.stop})"
    return [
        str(0 if group is None else len(group)),
        f"**{label}** (chosen)" if chosen else label,
        "" if one.expected_loss is None else f"{one.expected_loss:.1%}",
        f"{quality.loss:+.1%} ({quality.loss_low:+.1%} to {quality.loss_high:+.1%})",
        f"{quality.score:.3f}",
        "" if one.first_token_agreement is None else f"{one.first_token_agreement:.0%}",
        "" if one.divergence is None else f"{one.divergence.mean:.4f}",
        "" if one.recompute_s is None else f"{one.recompute_s * 1e3:.0f} ms",
    ]


def _group(chosen: ProfilePoint) -> str:
    return "nothing" if chosen.group is None else f"layers [{chosen.group[0]}, {chosen.group[1]})"


def _score(score: Any) -> str:
    return "-" if score is None else f"{score.mean:.3f} ({score.low:.3f} to {score.high:.3f})"
