"""Records write JSON that reads back equal, and refuse what is not theirs, naming the key."""

import dataclasses
import json
import os
from typing import Literal

import pytest

from osdp_ray.errors import RecordError
from osdp_ray.records.plan import Plan
from osdp_ray.records.profile import Parameter, Profile
from osdp_ray.schema import Record, format_table, read_json, record, write_json
from tests.regenerate_golden import PROFILE, golden_plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    shape: tuple[int, ...]
    pair: tuple[int, str]


@record("sample-record", version=3)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer(Record):
    name: str
    ratio: float
    on: bool
    count: int
    kind: Literal["a", "b"]
    inner: tuple[Inner, ...]
    by_name: dict[str, int]
    maybe: int | None
    later: int = 7


def example(**changes):
    values = {
        "name": "x",
        "ratio": 0.1,
        "on": True,
        "count": 2,
        "kind": "a",
        "inner": (Inner(shape=(2, 3), pair=(1, "one")),),
        "by_name": {"k": 1},
        "maybe": None,
    }
    return Outer(**{**values, **changes})


def test_a_record_reads_back_equal_from_its_file(tmp_path):
    path = tmp_path / "below" / "record.json"
    example(maybe=5).save(path)
    assert Outer.load(path) == example(maybe=5)
    assert json.loads(path.read_text())["record"] == "sample-record"
    assert json.loads(path.read_text())["schema_version"] == 3


def test_real_profiles_and_plans_read_back_equal(tmp_path):
    profile = Profile.load(PROFILE)
    plan = golden_plan(profile, 32)
    plan.save(tmp_path / "plan.json")
    profile.save(tmp_path / "profile.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Profile.load(tmp_path / "profile.json") == profile


def test_what_has_a_default_may_be_missing_and_whole_numbers_are_floats_too():
    values = example().to_json()
    del values["later"]
    assert Outer.from_json({**values, "ratio": 2}) == example(ratio=2.0)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"count": "2"}, r"count: int is needed, not '2'"),
        ({"count": True}, r"count: int is needed, not True"),
        ({"count": 2.0}, r"count: int is needed"),
        ({"on": 1}, r"on: bool is needed"),
        ({"ratio": True}, r"ratio: float is needed"),
        ({"name": None}, r"name: str is needed"),
        ({"kind": "c"}, r"kind: 'c' is none of 'a', 'b'"),
        ({"inner": {}}, r"inner: a list is needed"),
        ({"inner": [{"shape": [1, "2"], "pair": [1, "a"]}]}, r"inner\[0\].shape\[1\]: int is needed"),
        ({"inner": [{"shape": [1], "pair": [1]}]}, r"inner\[0\].pair: a list of 2 is needed, not of 1"),
        ({"inner": [{"shape": [1]}]}, r"inner\[0\]: the key 'pair' is missing"),
        ({"inner": [3]}, r"inner\[0\]: an object is needed"),
        ({"by_name": [1]}, r"by_name: an object is needed"),
        ({"by_name": {"k": "1"}}, r"by_name.k: int is needed"),
        ({"maybe": "5"}, r"maybe: int is needed"),
        ({"extra": 1}, r"it has no key 'extra'; it has name, ratio"),
        ({"record": "plan"}, r"a record of kind 'plan', and a 'sample-record' is needed"),
        ({"schema_version": 2}, r"schema_version is 2 and this release reads 3; write the file anew"),
    ],
)
def test_a_wrong_value_is_refused_with_the_path_of_its_key(changes, problem):
    with pytest.raises(RecordError, match=problem):
        Outer.from_json({**example().to_json(), **changes})


def test_a_missing_key_and_a_value_that_is_no_object_are_refused():
    values = example().to_json()
    del values["ratio"]
    with pytest.raises(RecordError, match=r"f\.json: the key 'ratio' is missing"):
        Outer.from_json(values, source="f.json")
    with pytest.raises(RecordError, match="is a JSON object, this is a list"):
        Outer.from_json([])


def test_a_file_that_is_missing_binary_or_no_json_is_refused_by_its_path(tmp_path):
    with pytest.raises(RecordError, match=r"gone.json: it cannot be read \(No such file"):
        Outer.load(tmp_path / "gone.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecordError, match="binary: it is no text file"):
        read_json(tmp_path / "binary")
    (tmp_path / "torn.json").write_text('{\n"a": ')
    with pytest.raises(RecordError, match=r"torn.json: it is no JSON: .* in line 2"):
        read_json(tmp_path / "torn.json")


def test_a_file_is_written_whole_or_not_at_all_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "values.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["values.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_table_pads_columns_and_puts_numbers_to_the_right():
    assert format_table(("name", "size"), [("a", "1.5 GiB"), ("long one", "12")]).splitlines() == [
        "name         size",
        "--------  -------",
        "a         1.5 GiB",
        "long one       12",
    ]


@pytest.mark.parametrize(
    ("shape", "num_shards", "shard_bytes"),
    [((8, 3), 4, 24), ((9, 3), 4, 36), ((2, 3), 4, 12), ((5,), 8, 4), ((), 8, 4), ((0, 3), 2, 0)],
)
def test_a_shard_is_padded_to_the_largest_of_the_first_dimension(shape, num_shards, shard_bytes):
    parameter = Parameter(name="w", shape=shape, itemsize_bytes=4, requires_grad=True)
    assert parameter.shard_bytes(num_shards) == shard_bytes
