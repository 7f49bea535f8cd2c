"""The lineage fold: which change shows in the KV and hidden states of which layer."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkin.kv.lineage import LayerWeights, Lineage, fold_lineage, shared_depth, shared_transition

NUM_LAYERS = 6
LAYERS = st.integers(0, NUM_LAYERS - 1)


def layers(**changed: tuple[int, bytes]) -> list[LayerWeights]:
    """Weights of a model; ``kv_inputs=(3, b"x")`` changes that field of layer 3."""
    made = [LayerWeights(b"kv%d" % index, b"whole%d" % index, b"geometry") for index in range(NUM_LAYERS)]
    for name, (layer, value) in changed.items():
        made[layer] = msgspec.structs.replace(made[layer], **{name: value})
    return made


BASE = fold_lineage(b"root", b"float32", layers())


def first_difference(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> int:
    """Where two chains part; all entries after that differ, too."""
    equal = [left == right for left, right in zip(one, other, strict=True)]
    first = equal.index(False) if False in equal else len(equal)
    assert not any(equal[first:]), "lineages are chains: once they differ, all later ones do"
    return first


def test_shape() -> None:
    assert (len(BASE.kv), len(BASE.hidden), BASE.num_layers) == (NUM_LAYERS, NUM_LAYERS + 1, NUM_LAYERS)
    assert len({*BASE.kv, *BASE.hidden, BASE.id}) == 2 * NUM_LAYERS + 2


def test_golden_value() -> None:
    """Stored lineages must survive an upgrade or be refused: a change of this value is a change of the format."""
    assert BASE.id.hex() == "058830411b3c58522f5a5df8f971a735"


@given(LAYERS)
def test_what_makes_k_and_v_shows_from_its_layer_on(layer: int) -> None:
    """k, v, k_norm and input norm of layer i: the KV of layer i, the hidden states leaving it (whole differs, too)."""
    changed = fold_lineage(b"root", b"float32", layers(kv_inputs=(layer, b"new"), whole=(layer, b"new")))
    assert first_difference(BASE.kv, changed.kv) == layer
    assert first_difference(BASE.hidden, changed.hidden) == layer + 1


@given(LAYERS)
def test_the_rest_of_a_layer_shows_one_layer_later(layer: int) -> None:
    """q, o, MLP and post norm of layer i leave its KV alone."""
    changed = fold_lineage(b"root", b"float32", layers(whole=(layer, b"new")))
    assert first_difference(BASE.kv, changed.kv) == layer + 1 if layer < NUM_LAYERS - 1 else BASE.kv == changed.kv
    assert first_difference(BASE.hidden, changed.hidden) == layer + 1


@given(LAYERS)
def test_geometry_shows_at_its_layer(layer: int) -> None:
    """Another window changes what is read, hence the identity of that layer's KV."""
    changed = fold_lineage(b"root", b"float32", layers(geometry=(layer, b"new")))
    assert first_difference(BASE.kv, changed.kv) == layer


@pytest.mark.parametrize(("root", "numerics"), [(b"other", b"float32"), (b"root", b"bfloat16")])
def test_embedding_and_numerics_show_everywhere(root: bytes, numerics: bytes) -> None:
    changed = fold_lineage(root, numerics, layers())
    assert first_difference(BASE.kv, changed.kv) == 0
    assert first_difference(BASE.hidden, changed.hidden) == 0


def test_swapped_layers_differ() -> None:
    swapped = layers()
    swapped[1], swapped[2] = swapped[2], swapped[1]
    assert shared_depth(BASE, fold_lineage(b"root", b"float32", swapped)) == 1


@given(LAYERS, st.booleans())
def test_shared_depth_and_transition(layer: int, in_kv: bool) -> None:
    """Depth: layers of equal KV. Transition: also the hidden states entering it are equal, so the receiver may go on there."""
    fields = {"whole": (layer, b"new"), **({"kv_inputs": (layer, b"new")} if in_kv else {})}
    other = fold_lineage(b"root", b"float32", layers(**fields))
    depth = layer if in_kv else layer + 1
    assert shared_depth(BASE, other) == shared_depth(other, BASE) == depth
    transition = shared_transition(BASE, other)
    assert BASE.kv[:transition] == other.kv[:transition]
    if transition < NUM_LAYERS:
        assert BASE.hidden[transition] == other.hidden[transition]
        # the deepest such layer
        assert transition == NUM_LAYERS - 1 or BASE.kv[transition] != other.kv[transition] or not in_kv
    assert transition == (layer if layer < NUM_LAYERS - 1 or in_kv else NUM_LAYERS)


def test_equal_models_share_everything() -> None:
    again = fold_lineage(b"root", b"float32", layers())
    assert again == BASE
    assert again.id == BASE.id
    assert shared_depth(BASE, again) == shared_transition(BASE, again) == NUM_LAYERS


def test_a_strangers_lineage_shares_nothing() -> None:
    other = fold_lineage(b"other", b"float32", layers())
    assert shared_depth(BASE, other) == shared_transition(BASE, other) == 0


@given(st.lists(st.binary(max_size=3), min_size=1, max_size=4), st.lists(st.binary(max_size=3), min_size=1, max_size=4))
def test_ids_are_those_of_the_kv(one: list[bytes], other: list[bytes]) -> None:
    """The id names the KV of all layers: a last layer that differs after its k and v (or a head) is the same sender."""
    ids = [Lineage((b"hidden",) * (len(kv) + 1), tuple(kv)).id for kv in (one, other)]
    assert (ids[0] == ids[1]) == (one == other)
