"""A workload is named on the command line, identified by what it is, and says what it lacks."""

import sys

import pytest

from osdp_ray.errors import UsageError, WorkloadError
from osdp_ray.workload import Workload, load_workload


class Tiny(Workload):
    def __init__(self, width=1):
        self.width = width

    def settings(self):
        return {"width": self.width}


def make(width: int, rate: float = 0.5, name: str = "n", on: bool = False):
    workload = Tiny(width)
    workload.rate, workload.name, workload.on = rate, name, on
    return workload


def not_one():
    return object()


def broken():
    raise KeyError("size")


def annotated_by_texts(width: "int", height: "int | None" = None):
    return Tiny((width, height))


def takes_all(width: int = 1, **others):
    return Tiny((width, others))


NO_FUNCTION = 3
SPEC = f"{__name__}:make"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


def test_arguments_are_converted_by_the_functions_annotations():
    workload = load_workload(SPEC, {"width": "3", "rate": "1e-3", "name": "7", "on": "True"})
    assert (workload.width, workload.rate, workload.name, workload.on) == (3, 1e-3, "7", True)


@pytest.mark.parametrize(
    ("spec", "arguments", "remedy"),
    [
        ("gpd", {}, r"no workload is called 'gpd'. Use gpt, hf, family, or package.module:function"),
        ("no_such_module:f", {}, r"cannot be imported .* Run from the folder that holds it, or install it"),
        (f"{__name__}:nothing", {}, r"has no 'nothing'. Name a function that returns a Workload"),
        (f"{__name__}:NO_FUNCTION", {}, r"has a 'NO_FUNCTION' that is no function. Name a function that returns"),
        (":f", {}, r"no workload is called ':f'"),
        ("runs/a/profile.json", {}, r"is a file, and a workload is needed: gpt, hf, .* 'osdp plan FILE' plans"),
        ("gpt", {"layers": "two"}, r"layers=two of workload 'gpt' is no int. Give layers=a whole number"),
        (f"{__name__}:annotated_by_texts", {"width": "two"}, r"width=two .* is no int"),
        (f"{__name__}:not_one", {}, r"returned a object, and an osdp_ray.Workload is needed"),
        (SPEC, {"height": "3", "width": "1"}, r"takes no 'height'. It takes width, rate, name, on"),
        (SPEC, {"width": "3.5"}, r"width=3.5 .* is no int"),
        (SPEC, {"width": "1", "rate": "fast"}, r"rate=fast .* is no float"),
        (SPEC, {"width": "1", "on": "yes"}, r"on=yes .* is no bool"),
        (SPEC, {}, r"needs width=VALUE"),
    ],
)
def test_a_spec_that_cannot_work_is_refused_with_what_would(spec, arguments, remedy):
    with pytest.raises(UsageError, match=remedy):
        load_workload(spec, arguments)


def test_annotations_may_be_texts_and_optional():
    workload = load_workload(f"{__name__}:annotated_by_texts", {"width": "3", "height": "4"})
    assert workload.width == (3, 4)


def test_a_function_that_takes_all_gets_all():
    assert load_workload(f"{__name__}:takes_all", {"width": "3", "depth": "4"}).width == (3, {"depth": "4"})


def test_what_a_function_or_its_module_raises_is_said_with_the_place(tmp_path, monkeypatch):
    with pytest.raises(WorkloadError, match=rf"function {__name__}:broken raised KeyError: 'size' \({__file__}:\d+\)"):
        load_workload(f"{__name__}:broken", {})
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "raising_module.py").write_text("\nx = 1 / 0\n")
    (tmp_path / "torn_module.py").write_text("def f(:\n")
    with pytest.raises(
        WorkloadError, match=r"module raising_module raised ZeroDivisionError: .*raising_module\.py:2\)"
    ):
        load_workload("raising_module:f", {})
    with pytest.raises(WorkloadError, match=r"module torn_module raised SyntaxError: .*torn_module\.py:1\)"):
        load_workload("torn_module:f", {})


def test_the_hash_depends_on_settings_and_class_alone():
    class Other(Tiny):
        pass

    assert Tiny(1).hash() == Tiny(1).hash()
    assert len({Tiny(1).hash(), Tiny(2).hash(), Other(1).hash()}) == 3


def test_the_base_class_names_the_method_that_is_missing():
    workload = Workload()
    for call, name in (
        (lambda: workload.build_model(), "build_model"),
        (lambda: workload.build_batches(0, 1, 1, 0, 0), "build_batches"),
        (lambda: workload.loss(None, None), "loss"),
        (lambda: workload.build_optimizer([]), "build_optimizer"),
    ):
        with pytest.raises(NotImplementedError, match=f"Workload needs {name}"):
            call()
    assert workload.build_eval_batches(0, 1, 1) is None
    assert workload.build_scheduler(None, 1) is None
    assert workload.blocks is None
