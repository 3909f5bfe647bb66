"""Fitting link costs, and which groups and sizes are measured. No process is started here."""

import random

import pytest

from osdp_ray.profiling.links import FREE_BYTES_PER_S, fit_link, group_members, measure_links, measured_sizes
from osdp_ray.records.cluster import Cluster, Device, Node
from osdp_ray.records.profile import LinkCost
from osdp_ray.units import KIB, MIB

SIZES = [64 * KIB * 4**power for power in range(6)]


def line(latency_s, bytes_per_s, sizes=SIZES):
    return [latency_s + size / bytes_per_s for size in sizes]


@pytest.mark.parametrize("latency_s", [0.0, 20e-6, 5e-3])
@pytest.mark.parametrize("bytes_per_s", [5e6, 1e9, 3e11])
def test_a_fit_recovers_latency_and_bandwidth_exactly(latency_s, bytes_per_s):
    fitted_latency_s, fitted_bytes_per_s, residual_fraction = fit_link(SIZES, line(latency_s, bytes_per_s))

    assert fitted_latency_s == pytest.approx(latency_s, rel=1e-6, abs=1e-12)
    assert fitted_bytes_per_s == pytest.approx(bytes_per_s, rel=1e-6)
    assert residual_fraction == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("outlier", range(len(SIZES)))
@pytest.mark.parametrize("factor", [0.2, 10.0])
def test_one_disturbed_point_moves_no_fit(outlier, factor):
    seconds = line(1e-3, 1e9)
    seconds[outlier] *= factor

    latency_s, bytes_per_s, _ = fit_link(SIZES, seconds)

    assert latency_s == pytest.approx(1e-3, rel=1e-6)
    assert bytes_per_s == pytest.approx(1e9, rel=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_a_fit_of_noisy_points_predicts_as_well_as_the_noise_allows(seed):
    rng = random.Random(seed)
    clean = line(1e-3, 1e9)
    seconds = sorted(value * rng.uniform(0.9, 1.1) for value in clean)

    latency_s, bytes_per_s, residual_fraction = fit_link(SIZES, seconds)
    link = LinkCost(
        group="world", collective="all_gather", latency_s=latency_s, bytes_per_s=bytes_per_s, residual_fraction=0.0
    )

    assert [link.seconds(size) for size in SIZES] == pytest.approx(clean, rel=0.2)
    assert residual_fraction <= 0.2


def test_a_fit_never_has_a_negative_latency_or_bandwidth():
    slower_per_byte_when_large = fit_link(SIZES[:3], [1e-6, 1e-5, 1e-2])
    faster_when_large = fit_link(SIZES[:3], [3e-3, 2e-3, 1e-3])

    assert slower_per_byte_when_large[0] == 0.0
    assert slower_per_byte_when_large[1] > 0
    assert faster_when_large[0] == 0.0
    assert 0 < faster_when_large[1] < FREE_BYTES_PER_S, "a link without a cost per byte"


def measured(*points, latency_s=1e-3, bytes_per_s=1e9):
    """A link whose line is given, with these points: (bytes, measured over the line)."""
    return LinkCost(
        group="world",
        collective="all_gather",
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        residual_fraction=0.0,
        residuals=tuple((size, ratio - 1) for size, ratio in points),
    )


def test_a_link_follows_what_was_measured_from_point_to_point():
    link = measured((64 * KIB, 1.0), (256 * KIB, 0.9), (MIB, 1.1))
    clean = dict(zip(SIZES, line(1e-3, 1e9), strict=True))

    assert link.seconds(64 * KIB) == pytest.approx(clean[64 * KIB])
    assert link.seconds(256 * KIB) == pytest.approx(0.9 * clean[256 * KIB])
    between = (link.seconds(256 * KIB) + link.seconds(MIB)) / 2
    assert link.seconds((256 * KIB + MIB) // 2) == pytest.approx(between)
    assert link.seconds(4 * MIB) == pytest.approx(1.1 * clean[4 * MIB]), "beyond the points as far off as the last one"
    assert link.seconds(1) == pytest.approx(1e-3, rel=1e-3)


def test_a_disturbed_point_of_a_link_misleads_at_most_twofold():
    link = measured((64 * KIB, 1.0), (256 * KIB, 1.0), (MIB, 10.0), (4 * MIB, 1.0))

    assert link.seconds(MIB) <= 2 * (1e-3 + MIB / 1e9) * 1.0001
    assert link.seconds(4 * MIB) == pytest.approx(1e-3 + 4 * MIB / 1e9)


@pytest.mark.parametrize("seed", range(20))
def test_more_bytes_never_take_fewer_seconds(seed):
    rng = random.Random(seed)
    link = measured(*((size, rng.uniform(0.2, 3.0)) for size in SIZES), latency_s=rng.choice((0.0, 1e-3)))

    seconds = [link.seconds(round(1.2**power)) for power in range(110)]

    assert seconds == sorted(seconds)


def test_in_node_and_cross_node_groups_are_measured_only_where_they_differ_from_the_world():
    assert group_members((4,)) == {"world": ((0, 1, 2, 3),)}
    assert group_members((1, 1, 1)) == {"world": ((0, 1, 2),)}
    assert group_members((2, 1)) == {"world": ((0, 1, 2),)}
    assert group_members((2, 2, 2)) == {
        "world": ((0, 1, 2, 3, 4, 5),),
        "node": ((0, 1), (2, 3), (4, 5)),
        "across": ((0, 2, 4), (1, 3, 5)),
    }


def test_sizes_go_up_to_the_largest_tensor_and_no_further_than_64_mib():
    assert measured_sizes(0) == (64 * KIB, 256 * KIB, MIB)
    assert measured_sizes(16 * MIB) == (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
    assert measured_sizes(40 * MIB)[-2:] == (16 * MIB, 40 * MIB)
    assert measured_sizes(2**40)[-1] == 64 * MIB


def test_the_links_of_a_single_rank_cost_nothing_and_start_nothing():
    node = Node(node_id="a", address="127.0.0.1", hostname="here", num_cpus=1.0, memory_bytes=1)
    device = Device(node_id="a", index=0, kind="cpu", name="CPU", uuid="0", memory_bytes=1, free_bytes=1)

    class Alone:
        cluster = Cluster(nodes=(node,), devices=(device,))

    links = measure_links(Alone(), largest_bytes=MIB)

    assert {link.collective for link in links} == {"all_gather", "reduce_scatter", "all_reduce"}
    assert {link.group for link in links} == {"world"}
    assert all(link.seconds(64 * MIB) < 1e-6 for link in links)
