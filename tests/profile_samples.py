"""A small profile of two symbolic models, for tests of everything that reads profiles."""

from __future__ import annotations

import msgspec

from kvkin.configs.profiles import (
    Divergence,
    LayerSensitivity,
    Made,
    MeasuredGroup,
    Profile,
    ProfileData,
    Quality,
    Score,
    Scores,
    TokenStats,
    layer_group,
    profile_point,
    profiled_model,
)
from kvkin.kv.frontier import choose, pareto, point
from kvkin.kv.lineage import LayerWeights, Lineage, fold_lineage

LAYERS = 6
# group -> loss of generated answers; None: full reuse
LOSSES: dict[tuple[int, int] | None, float] = {None: 0.2, (2, 4): 0.02, (0, 3): 0.01, (1, 6): -0.01}


def lineage(
    name: str,
    *,
    changed: int | None = None,
    kv_too: bool = False,
    layers: int = LAYERS,
    numerics: bytes = b"float32",
) -> Lineage:
    """Lineage of a model; ``changed`` is a layer whose weights are others than usual, with ``kv_too`` those of k and v as well."""

    def layer(index: int) -> LayerWeights:
        inputs = whole = f"{name}-{index}".encode()
        if index == changed:
            whole += b"-changed"
            inputs += b"-changed" if kv_too else b""
        return LayerWeights(inputs, whole, b"geometry")

    return fold_lineage(b"root", numerics, [layer(index) for index in range(layers)])


class Known(msgspec.Struct, frozen=True):
    """A model as profiles are compared with it."""

    lineage: Lineage
    head_digest: bytes = b"head"


def sample_profile(
    sender: str,
    sender_lineage: Lineage,
    receiver: str,
    receiver_lineage: Lineage,
    losses: dict[tuple[int, int] | None, float] = LOSSES,
    max_loss: float = 0.05,
    *,
    receiver_head: bytes | None = None,
) -> Profile:
    """A profile with answers for the groups of ``losses``, drawn and chosen as the profile tool does it."""
    full = Score(mean=0.7, low=0.66, high=0.74, n=50)
    spread = Divergence(mean=0.3, p10=0.1, p90=0.6, n=50)
    groups = tuple(
        MeasuredGroup(
            group=group,
            divergence=spread,
            quality=Quality(
                score=round(0.7 * (1 - loss), 4),
                loss=loss,
                loss_low=round(loss - 0.03, 4),
                loss_high=round(loss + 0.03, 4),
                n=50,
            ),
            recompute_s=0.125 * (0 if group is None else group[1] - group[0]),
            first_token_agreement=0.9,
        )
        for group, loss in losses.items()
    )
    points = [point(layer_group(group), loss) for group, loss in losses.items()]
    chosen = choose(points, max_loss)
    return Profile(
        sender=profiled_model(sender, sender_lineage),
        receiver=profiled_model(receiver, receiver_lineage, receiver_head),
        metric="f1",
        data=ProfileData(
            name="squad",
            digest="0123abcd",
            split="profile",
            samples=50,
            context_tokens=TokenStats(min=100, p50=180, mean=201.5, max=400),
        ),
        group_size=1,
        max_loss=max_loss,
        scores=Scores(full=full),
        full_reuse_is_fine=losses.get(None, 1.0) <= max_loss,
        chosen=None if chosen is None else profile_point(chosen),
        frontier=tuple(map(profile_point, pareto(points))),
        sensitivity=tuple(
            LayerSensitivity(layer=index, mean=index / 8, p10=0.0, p50=0.1, p90=0.2, n=50)
            for index in range(receiver_lineage.num_layers)
        ),
        groups=groups,
        made=Made(date="2026-01-02T03:04:05Z", settings={"seed": 1}, versions={"kvkin": "0.1.0"}),
    )
