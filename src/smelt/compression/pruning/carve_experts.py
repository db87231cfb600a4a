"""Read-ME: a dense decoder becomes experts of half its feed-forward width, chosen by one router (Cai et al., 2024).

Domain d makes neuron j of a layer important by mean |h_j| over its tokens, where h is the input of the down projection.
Expert k keeps the most important neurons of its domain, `width` of all. Neurons that all experts keep are stored once
and used by every token; a token of expert k also uses the others of k, in every layer the same k.

The router reads token ids, ahead of all layers, and learns which expert has the neurons that are largest. With N
private neurons per expert, M their indicators [experts, neurons], and [.] 1 where a condition holds, in each layer

    q = sum over ranks r in (N - 1, 4N/5, 3N/5, 2N/5, N/5) of [|h| > its value of rank r] / 3N
    d = 10 (q M^T - mean);  loss = 0.75 CE(router, argmax d; label smoothing 0.5) + 0.25 CE(router, softmax d)

The sum of these cross-entropies over layers is one with the mean of their targets, which is computed once. Then the
experts train with the router fixed.

Differences from the published code: the router trains once, because the dense model that it learns from stays the same;
copies of a neuron that several experts keep train apart; |h| in both steps; attention of the router has a window; if
there are fewer experts than domains, similar domains share one. The paper trains on 1B tokens.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.compression.base import (
    METHODS,
    Batch,
    CalibrationSize,
    MethodContext,
    ResourceEstimate,
    UndecidedWidth,
    within,
)
from smelt.compression.calibration.domain_neurons import (
    check_domain,
    feed_forwards,
    jaccard,
    measure_importance,
    observe_hidden,
    read_domain,
    top_mask,
)
from smelt.compression.calibration.gradients import gradient_bytes
from smelt.compression.distillation.intermediates import NetworkOutputs
from smelt.compression.distillation.losses import Labels, LossTerm
from smelt.compression.distillation.network_training import VALIDATION, LogitDistillation
from smelt.compression.distillation.samples import Samples
from smelt.compression.distillation.student import Student
from smelt.compression.distillation.teachers import DenseTeacher
from smelt.compression.distillation.training_run import remember_dtypes, restore_dtypes
from smelt.data.batches import text_batches
from smelt.errors import DataError, ModelError, RecipeError
from smelt.measure.cost import active_parameters, block_parameters
from smelt.models.anatomy import Anatomy, Part
from smelt.models.carved_experts import LayerChannels, carve, check_carvable
from smelt.models.expert_router import ExpertRouter, RouterConfig
from smelt.models.model import Model
from smelt.train.trainer.config import OptimizerConfig
from smelt.train.trainer.tasks import TrainingTask

BATCH = 4  # sequences per forward pass of the dense model
TARGETS = "router_targets"  # of a batch: distribution over experts, [batch, tokens, experts]
_RANKS = (5, 4, 3, 2, 1)  # fifths of the private neurons
_LABEL_SHARE, _SMOOTHING, _SHARPNESS = 0.75, 0.5, 10.0


@METHODS.register(
    "carve-experts",
    paper="Cai et al., Read-ME: Refactorizing LLMs as Router-Decoupled Mixture of Experts with System Co-Design, "
    "NeurIPS 2024 (arXiv 2410.19123)",
    needs=("texts of several domains",),
)
@dataclass(frozen=True, kw_only=True)
class CarveExperts(LogitDistillation):
    """Use for a decoder that serves several domains: each token uses a part of every feed-forward."""

    domains: tuple[str, ...] = ()  # texts, one source each: a file, FILE:COLUMN of a table, or default
    experts: int | None = None  # null: one per domain; fewer: the most similar domains share one
    width: float = 0.5  # channels of each feed-forward that a token uses, as a fraction
    samples: int = 64  # sequences of each domain, to choose neurons and to train on
    seq_len: int = 256  # tokens of each
    router_width: int = 128  # at most the hidden size
    router_layers: int = 1  # blocks of attention and feed-forward
    router_window: int = 128  # tokens that the router's attention sees
    router_epochs: float = 8.0  # over the samples
    router_optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-3, weight_decay=0.01))
    losses: tuple[LossTerm, ...] = (Labels(),)  # terms that are added up, for the experts
    epochs: float = 1.0  # of the experts, with the router fixed; 0: no training
    batch_size: int = 8  # sequences per step
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-4, weight_decay=0.01))
    select: str = "best"  # checkpoint, by the loss on those samples; or last

    needs: ClassVar[tuple[str, ...]] = ("texts of several domains",)
    trains: ClassVar[bool] = False  # in one process, which has trained the router
    min_epochs: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("experts", 2, 64), ("samples", 2, 10**7), ("seq_len", 2, 10**6), ("router_width", 4, 8192),
            ("router_layers", 1, 16), ("router_window", 1, 10**5), ("router_epochs", 1e-6, 1e6),
        ):  # fmt: skip
            if getattr(self, name) is not None:
                within(self.name, name, getattr(self, name), low, high)
        within(self.name, "width", self.width, 1e-3, 1.0)
        if self.width == 1:
            raise RecipeError(f"{self.name} would carve nothing with width 1; give a fraction below 1, such as 0.5.")
        super().__post_init__()
        if self.experts is not None and self.domains and self.experts > len(self.domains):
            raise RecipeError(
                f"{self.name} carves one expert out of each domain, so {len(self.domains)} domains are too few for "
                f"{self.experts} experts; name more domains, or ask for fewer experts."
            )

    @property
    def num_experts(self) -> int:
        return self.experts or max(len(self.domains), 2)

    def check(self, anatomy: Anatomy) -> None:
        check_carvable(anatomy)
        if len(self.domains) < 2:
            raise DataError(
                f"{self.name} carves an expert out of each domain of text and needs at least two; name their files, "
                "such as `--set domains=[wiki.txt,code.jsonl:code]`."
            )
        for source in self.domains:
            check_domain(source)
        narrow = next((part for part in feed_forwards(anatomy) if int(self.width * part.units) < 1), None)
        if narrow is not None:
            raise RecipeError(f"width {self.width:g} leaves no channel of {narrow.path}, which has {narrow.units}.")
        config = self._router_config(anatomy)
        if config.width // config.heads % 2:
            raise RecipeError(f"router_width {config.width} of {self.name} must be even.")

    def reshape(self, anatomy: Anatomy, undecided: Mapping[str, UndecidedWidth]) -> Mapping[str, UndecidedWidth]:
        """Carve experts without shared channels: the largest result."""
        channels = []
        for part in feed_forwards(anatomy):
            kept = tuple(range(int(self.width * part.units)))
            channels.append(LayerChannels((), (kept,) * self.num_experts))
        with torch.device("meta"):
            router = ExpertRouter(self._router_config(anatomy))
        carve(anatomy, channels, router)
        return undecided

    @property
    def keeps_plain_shape(self) -> bool:
        return False

    def targets(self) -> dict[str, float]:
        return {"active_width": self.width}

    def added_parameters(self, anatomy: Anatomy) -> int:
        """Experts without shared channels, and the router."""
        config = self._router_config(anatomy)
        router = config.vocab_size * config.width + config.layers * 6 * config.width**2
        weights = sum(3 * part.units * part.output.out_features for part in feed_forwards(anatomy))
        return router + max(int((self.num_experts * self.width - 1) * weights), 0)

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        trained = 4 * (sum(p.numel() for p in anatomy.network.parameters()) + self.added_parameters(anatomy))
        copies = 2 + 2 + (self.teacher is not None)  # weights, gradients, and the moments of AdamW
        memory = trained * copies + gradient_bytes(anatomy, self.batch_size, self.seq_len)
        tokens = max(len(self.domains), 2) * self.samples * self.seq_len
        passes = 2 + self.epochs * (4 if self.teacher else 3)
        return ResourceEstimate(passes=passes * tokens / max(size.tokens, 1), memory=memory)

    def to_json(self) -> dict[str, Any]:
        router_optimizer = dataclasses.asdict(self.router_optimizer)
        return {**super().to_json(), "domains": list(self.domains), "router_optimizer": router_optimizer}

    def apply(self, model: Model, context: MethodContext) -> dict[str, Any]:
        self.check(model.anatomy)
        data = self.read_domains(model, context.seed)
        dtypes = remember_dtypes(model.network)
        device = context.device or model.device
        model.network.float().to(device)
        anatomy, before = model.anatomy, block_parameters(model.anatomy)
        importance, stability = measure_importance(
            anatomy, data, self.width, lambda items: context.progress.track(items, self.name)
        )
        groups = group_domains(importance, self.num_experts, self.width)
        channels = choose_channels(importance, groups, self.width)
        if not any(any(layer.experts) for layer in channels):
            raise DataError(
                "all domains need the same channels, so there is nothing to route; name texts that differ more."
            )
        targets = router_targets(anatomy, data, channels, lambda items: context.progress.track(items, "routing"))
        samples, validation = _mixed(data, targets, device, context.seed).split(VALIDATION)
        router, facts = self._train_router(model, samples, validation, context)
        shares = router.shares(samples.tensors["input_ids"])
        _check_shares(shares, self.name)
        teacher = DenseTeacher(copy.deepcopy(model.network)) if self.teacher and self.epochs else None
        carve(anatomy, channels, router)
        if self.epochs:
            facts |= self.train_experts(model, teacher, samples, validation, context)
        model.network.eval()
        restore_dtypes(model.network, dtypes)
        return {
            **facts,
            "experts": {
                f"expert {index}": [self.domains[domain] for domain in group] for index, group in enumerate(groups)
            },
            "shared_channels": [len(layer.shared) for layer in channels],
            "expert_channels": [len(layer.experts[0]) for layer in channels],
            "mask_stability": stability,
            "routed_shares": shares,
            "domain_shares": {
                name: router.shares(torch.cat([batch["input_ids"] for batch in batches]).to(device))
                for name, batches in zip(self.domains, data, strict=True)
            },
            "block_parameters_before": before,
            "block_parameters_after": block_parameters(model.anatomy),
            "active_parameters": active_parameters(model.anatomy),
        }

    def read_domains(self, model: Model, seed: int) -> list[list[Batch]]:
        """Return batches of text of each domain, before anything expensive runs."""
        if model.tokenizer is None:
            raise ModelError(f"{self.name} reads texts, and this model has no tokenizer.")
        return [
            text_batches(
                read_domain(source), model.tokenizer, samples=self.samples, length=self.seq_len, batch_size=BATCH,
                seed=seed,
            )
            for source in self.domains
        ]  # fmt: skip

    def _router_config(self, anatomy: Anatomy) -> RouterConfig:
        return RouterConfig(
            vocab_size=int(anatomy.network.config.vocab_size), experts=self.num_experts,
            width=min(self.router_width, anatomy.hidden_size), layers=self.router_layers, window=self.router_window,
        )  # fmt: skip

    def _train_router(
        self, model: Model, samples: Samples, validation: Samples, context: MethodContext
    ) -> tuple[ExpertRouter, dict[str, Any]]:
        """Train the router on the targets, or take the one that an interrupted run has trained."""
        anatomy = model.anatomy
        router, embeddings = ExpertRouter(self._router_config(anatomy)), anatomy.embeddings[0]
        table: Any = embeddings.weight
        router.init_weights(table.detach().cpu(), torch.Generator().manual_seed(context.seed))
        router.to(samples.device)
        facts, weights = context.checkpoint.load_facts("router"), context.checkpoint.load("router")
        if facts is None or weights is None:
            student = RouterStudent(router, anatomy.network.config)
            task = TrainingTask(student, samples, validation, False, saves_model=False, graph_state=lambda: None)
            trained = self.train(
                task, model, context, samples.device, stage="router", epochs=self.router_epochs,
                optimizer=self.router_optimizer, precision="off",
            )  # fmt: skip
            facts = {f"router_{name}": value for name, value in trained.items()}
            weights = {name: tensor.detach().cpu().clone() for name, tensor in router.state_dict().items()}
            context.checkpoint.save("router", weights)
            context.checkpoint.save_facts("router", facts)
        router.load_state_dict(weights)
        return router.eval().requires_grad_(False), facts

    def train_experts(
        self, model: Model, teacher: DenseTeacher | None, samples: Samples, validation: Samples, context: MethodContext
    ) -> dict[str, Any]:
        student = Student(model.network, self.losses, teacher)
        train, held_out = (_without(part, TARGETS) for part in (samples, validation))
        task = TrainingTask(student, train, held_out, False, saves_model=False, graph_state=lambda: None)
        return self.train(task, model, context, samples.device, stage="experts")


class RouterStudent(nn.Module):
    """The router with its loss, for the trainer."""

    def __init__(self, router: ExpertRouter, config: Any) -> None:
        super().__init__()
        self.network, self.config = router, config

    def forward(self, **batch: Tensor) -> NetworkOutputs:
        logits, targets = self.network(batch["input_ids"], batch["attention_mask"]), batch[TARGETS]
        return NetworkOutputs(logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1)))


def group_domains(importance: Sequence[Sequence[Tensor]], experts: int, width: float) -> list[list[int]]:
    """Merge the two groups of domains whose masks overlap most until there is one group per expert."""
    groups = [[domain] for domain in range(len(importance))]
    while len(groups) > experts:
        masks = [
            [top_mask(values, width) for values in _group_importance(importance, group)] for group in groups
        ]  # [groups][layers]
        pairs = [(a, b) for a in range(len(groups)) for b in range(a + 1, len(groups))]
        overlap = [sum(jaccard(x, y) for x, y in zip(masks[a], masks[b], strict=True)) for a, b in pairs]
        first, second = pairs[max(range(len(pairs)), key=overlap.__getitem__)]
        groups[first] += groups.pop(second)
    return groups


def choose_channels(
    importance: Sequence[Sequence[Tensor]], groups: Sequence[Sequence[int]], width: float
) -> list[LayerChannels]:
    """Return for each layer the neurons that all groups of domains keep, and the others that each of them keeps."""
    by_group = [_group_importance(importance, group) for group in groups]
    channels = []
    for layer in range(len(importance[0])):
        masks = torch.stack([top_mask(group[layer], width) for group in by_group])  # [experts, neurons]
        shared = masks.all(dim=0)
        own = [tuple((mask & ~shared).nonzero()[:, 0].tolist()) for mask in masks]
        channels.append(LayerChannels(tuple(shared.nonzero()[:, 0].tolist()), tuple(own)))
    return channels


@torch.no_grad()
def router_targets(
    anatomy: Anatomy, data: Sequence[Sequence[Batch]], channels: Sequence[LayerChannels], track: Callable[[Any], Any]
) -> list[list[Tensor]]:
    """Return the mean over layers of what the router must predict, [batch, tokens, experts] by domain and batch."""
    parts = feed_forwards(anatomy)
    experts = len(channels[0].experts)
    masks = []
    for part, layer in zip(parts, channels, strict=True):
        mask = torch.zeros(experts, part.units, device=part.output.device)
        for index, own in enumerate(layer.experts):
            mask[index, list(own)] = 1.0
        masks.append(mask)
    private = [len(layer.experts[0]) for layer in channels]
    used = [index for index, count in enumerate(private) if count]  # the others decide nothing
    targets: list[list[Tensor]] = []
    for batches in track(data):
        targets.append([])
        for batch in batches:
            total = torch.zeros(*batch["input_ids"].shape, experts, device=masks[0].device)

            def add(layer: int, part: Part, hidden: Tensor, total: Tensor = total) -> None:
                if layer in used:
                    total += layer_target(hidden.abs().flatten(0, -2), masks[layer], private[layer]).view(total.shape)

            observe_hidden(anatomy, batch, parts, add)
            targets[-1].append(total.cpu() / len(used))  # once: each copy waits for the device
    return targets


def layer_target(values: Tensor, masks: Tensor, private: int) -> Tensor:
    """Return the distribution that one layer asks for, [tokens, experts], from |h| [tokens, neurons] and the private
    neurons [experts, neurons], so many per expert."""
    ranked = values.topk(private, dim=1).values  # descending
    graded = torch.zeros_like(values)
    for fifths in _RANKS:
        rank = private - 1 if fifths == len(_RANKS) else fifths * private // len(_RANKS)
        graded += (values > ranked[:, min(rank, private - 1), None]).to(values.dtype)
    counts = graded @ masks.T  # whole numbers, so that a tie is one on every machine
    scores = _SHARPNESS * (counts - counts.mean(dim=1, keepdim=True)) / (3 * private)
    experts = masks.shape[0]
    label = F.one_hot(counts.argmax(dim=1), experts).to(values.dtype)
    hard = (1 - _SMOOTHING) * label + _SMOOTHING / experts
    return _LABEL_SHARE * hard + (1 - _LABEL_SHARE) * scores.softmax(dim=1)


def _check_shares(shares: Sequence[float], name: str) -> None:
    if max(shares) >= 1.0:
        raise DataError(
            f"the router of {name} sends every token to one of {len(shares)} experts, so the others would never be "
            "used; name domains that differ more, give more samples, or train it longer (router_epochs)."
        )


def _group_importance(importance: Sequence[Sequence[Tensor]], group: Sequence[int]) -> list[Tensor]:
    """Return the mean importance of a group of domains, [neurons] by layer."""
    return [torch.stack(layer).mean(0) for layer in zip(*(importance[domain] for domain in group), strict=True)]


def _mixed(data: Sequence[Sequence[Batch]], targets: Sequence[Sequence[Tensor]], device: torch.device, seed: int) -> (
    Samples
):  # fmt: skip
    """Return the sequences of all domains in random order, with the targets of the router."""
    batches = [
        {**batch, TARGETS: target}
        for domain, wanted in zip(data, targets, strict=True)
        for batch, target in zip(domain, wanted, strict=True)
    ]
    samples = Samples.from_batches(batches, device, augment=False, seed=seed)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed)).to(device)
    return Samples({name: tensor[order] for name, tensor in samples.tensors.items()})


def _without(samples: Samples, name: str) -> Samples:
    return Samples({key: tensor for key, tensor in samples.tensors.items() if key != name})
