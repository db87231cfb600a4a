"""`smelt kv`: profile the KV cache of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smelt.cli.output import DeviceOption, JsonOption, ModelArgument, SeedOption, console, say, table, write_json
from smelt.progress import progress_bars

if TYPE_CHECKING:
    from smelt.kvcache.eviction.profile import EvictionProfile

app = typer.Typer(help="Profile the KV cache of a model.", pretty_exceptions_enable=False)

DataOption = Annotated[str, typer.Option("--data", help="Long texts: a file, a hub id, or default.")]
KeepOption = Annotated[float, typer.Option("--keep", help="Ratio of the KV cache to retain overall.")]
ScorerOption = Annotated[str, typer.Option("--scorer", help="Scorer of the tokens (docs/kv-cache.md).")]
GroupOption = Annotated[int, typer.Option("--heads", min=1, help="Heads per cluster that share pages, at most.")]
OutOption = Annotated[Path, typer.Option("-o", "--out", help="Write the profile to this file.")]


@app.callback()
def group() -> None:
    """Keep `profile` a subcommand while it is the only one."""


@app.command()
def profile(
    model: ModelArgument,
    out: OutOption,
    data: DataOption = "default",
    keep: KeepOption = 0.3,
    scorer: ScorerOption = "snapkv",
    count: Annotated[int, typer.Option("--samples", min=1, help="Sample prompts to measure.")] = 24,
    length: Annotated[int, typer.Option(min=64, help="Tokens per sample.")] = 1024,
    heads: GroupOption = 4,
    device: DeviceOption = "auto",
    json_file: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    """Measure a KV cache budget per layer and head over sample prompts, for `smelt serve --kv-profile`."""
    from smelt.data import load_text
    from smelt.kvcache.eviction.budget import check_keep
    from smelt.kvcache.eviction.budgets import make_budget_rule
    from smelt.kvcache.eviction.prefill import check_evictable, find_kv_shape
    from smelt.kvcache.eviction.profile import EvictionProfile
    from smelt.kvcache.eviction.profiling import measure_kept_ratios, sample_prompts
    from smelt.kvcache.eviction.scorers import make_scorer
    from smelt.models.load import load

    check_keep(keep)
    token_scorer = make_scorer(scorer)
    text = load_text(data)
    loaded = load(model, device=device)
    check_evictable(loaded)
    assert loaded.tokenizer is not None
    tokens = loaded.tokenizer(text.joined, verbose=False)["input_ids"]
    with progress_bars() as progress:
        ratios = measure_kept_ratios(
            loaded, sample_prompts(tokens, count, length, seed), token_scorer, make_budget_rule("ada"), keep, progress
        )
    profiled = EvictionProfile.from_ratios(find_kv_shape(loaded), scorer, keep, ratios).with_clusters(heads)
    profiled.save(out)
    content = describe(profiled, ratios)
    _show(model, profiled, content)
    say(f"{out} is written.")
    write_json(json_file, {"model": model, "profile": str(out), "seed": seed, **content})


def describe(profiled: EvictionProfile, ratios: Any) -> dict[str, Any]:
    """Summarize a profile for the JSON output."""
    from smelt.kvcache.eviction.clusters import cluster_heads, sharing_overhead
    from smelt.kvcache.eviction.profile import rank_stability

    budgets = profiled.budgets
    assert profiled.clusters is not None
    heads = profiled.clusters.size
    sharing = {}
    for scope in ("global", "per_layer", "adjacent"):
        num_heads = budgets.shape[1] if scope == "per_layer" else budgets.numel()
        if num_heads % heads == 0:
            sharing[scope] = sharing_overhead(budgets, cluster_heads(budgets, heads, scope)).ratio
    return {
        "keep": profiled.keep_ratio,
        "scorer": profiled.scorer,
        "samples": profiled.num_samples,
        "mean": float(profiled.budgets.new_tensor(profiled.mean).mean()),
        "budgets": budgets.tolist(),
        "budget": float(budgets.mean()),
        "within": float((ratios <= budgets + 1e-9).double().mean()),
        "rank_stability": float(rank_stability(ratios).mean()),
        "heads_that_share": heads,
        "over_ideal": sharing,
    }


def _show(model: str, profiled: EvictionProfile, content: dict[str, Any]) -> None:
    rows = [
        [str(layer), *(f"{value:.2f}" for value in heads)] for layer, heads in enumerate(profiled.budgets.tolist())
    ]  # ratio of evictable tokens
    headings = ["layer", *(f"head {head}" for head in range(profiled.shape.num_kv_heads))]
    console.print(table(f"{model}: KV cache budget per head (ratio of evictable tokens)", headings, rows))
    console.print(
        f"Heads retain {content['mean']:.3f} of the evictable tokens on average; with {profiled.alpha:g} standard "
        f"deviations {content['budget']:.3f}, which covers {content['within']:.0%} of all heads and samples. Rank "
        f"correlation of the heads between samples: {content['rank_stability']:.2f} (Spearman)."
    )
    for scope, over in content["over_ideal"].items():
        console.print(
            f"Pages of {content['heads_that_share']} heads, {scope}: {over:.2f} times the memory without sharing."
        )
