"""`smelt kv`: how many keys and values each head of a model needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from smelt.cli.output import DeviceOption, JsonOption, ModelArgument, SeedOption, console, say, table, write_json
from smelt.data import load_text
from smelt.kvcache.eviction.budget import check_keep
from smelt.kvcache.eviction.budgets import make_budget_rule
from smelt.kvcache.eviction.clusters import cluster_heads, sharing_overhead
from smelt.kvcache.eviction.prefill import check_evictable, kv_shape_of
from smelt.kvcache.eviction.profile import EvictionProfile, rank_stability
from smelt.kvcache.eviction.profiling import measure_kept_ratios, sample_prompts
from smelt.kvcache.eviction.scorers import SCORERS, make_scorer
from smelt.models.load import load
from smelt.progress import progress_bars

app = typer.Typer(help="How many keys and values each head of a model needs.", pretty_exceptions_enable=False)

DataOption = Annotated[str, typer.Option("--data", help="Long texts: a file, a hub id, or default.")]
KeepOption = Annotated[float, typer.Option("--keep", help="The share of keys and values that is kept in all.")]
ScorerOption = Annotated[str, typer.Option("--scorer", help=f"What a token is worth: {', '.join(SCORERS)}.")]
GroupOption = Annotated[int, typer.Option("--heads", min=1, help="Heads that share num_pages, at most.")]
OutOption = Annotated[Path, typer.Option("-o", "--out", help="Where the profile is written.")]


@app.callback()
def group() -> None:
    """So that `profile` is a word of its own also while there is no other."""


@app.command()
def profile(
    model: ModelArgument,
    out: OutOption,
    data: DataOption = "default",
    keep: KeepOption = 0.3,
    scorer: ScorerOption = "snapkv",
    count: Annotated[int, typer.Option("--samples", min=1, help="Texts that are read.")] = 24,
    length: Annotated[int, typer.Option(min=64, help="Tokens of each.")] = 1024,
    heads: GroupOption = 4,
    device: DeviceOption = "cpu",
    json_file: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    """A budget for each layer and head, found once over real texts; how alike they are; what sharing pages costs."""
    check_keep(keep)
    wanted = make_scorer(scorer)
    text = load_text(data)
    loaded = load(model, device=device)
    check_evictable(loaded)
    assert loaded.tokenizer is not None
    tokens = loaded.tokenizer(text.joined, verbose=False)["input_ids"]
    with progress_bars() as progress:
        found = measure_kept_ratios(
            loaded, sample_prompts(tokens, count, length, seed), wanted, make_budget_rule("ada"), keep, progress
        )
    made = EvictionProfile.from_ratios(kv_shape_of(loaded), scorer, keep, found).with_clusters(heads)
    made.save(out)
    content = describe(made, found)
    _show(model, made, content)
    say(f"{out} is written.")
    write_json(json_file, {"model": model, "profile": str(out), "seed": seed, **content})


def describe(made: EvictionProfile, found: Any) -> dict[str, Any]:
    """What a profile says of its model."""
    budgets = made.budgets
    assert made.clusters is not None
    heads = made.clusters.size
    sharing = {}
    for scope in ("global", "per_layer", "adjacent"):
        whole = budgets.shape[1] if scope == "per_layer" else budgets.numel()
        if whole % heads == 0:
            sharing[scope] = sharing_overhead(budgets, cluster_heads(budgets, heads, scope)).ratio
    alike = rank_stability(found)
    return {
        "keep": made.keep_ratio,
        "scorer": made.scorer,
        "samples": made.num_samples,
        "mean": float(made.budgets.new_tensor(made.mean).mean()),
        "budgets": budgets.tolist(),
        "budget": float(budgets.mean()),
        "within": float((found <= budgets + 1e-9).double().mean()),
        "rank_stability": float(alike.mean()),
        "heads_that_share": heads,
        "over_ideal": sharing,
    }


def _show(model: str, made: EvictionProfile, content: dict[str, Any]) -> None:
    rows = [
        [str(layer), *(f"{value:.2f}" for value in heads)] for layer, heads in enumerate(made.budgets.tolist())
    ]  # the share of what may go
    headings = ["layer", *(f"head {head}" for head in range(made.shape.num_kv_heads))]
    console.print(table(f"{model}: the share of its tokens that each head keeps", headings, rows))
    console.print(
        f"Kept on average {content['mean']:.3f} of what may go; with room for {made.alpha:g} deviations "
        f"{content['budget']:.3f}, within which {content['within']:.0%} of all heads stayed. Samples rank the heads "
        f"alike by {content['rank_stability']:.2f} (Spearman)."
    )
    for scope, over in content["over_ideal"].items():
        console.print(f"Pages shared by {content['heads_that_share']} heads, {scope}: {over:.2f} times the ideal.")
