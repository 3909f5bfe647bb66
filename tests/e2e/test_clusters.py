"""Planning a large model for a large cluster on a small machine, through the command line."""

import json
import resource
import subprocess
import sys

from osdp_ray.units import GIB

LLAMA_70B = (
    *("hf", "model=llama", "layers=80", "hidden=8192", "heads=64", "vocabulary=32000", "sequence=4096"),
    'overrides={"intermediate_size": 28672, "num_key_value_heads": 8}',
)
SCRIPT = """
import sys
from osdp_ray.cli import main
code = main(sys.argv[1:])
assert "ray" not in sys.modules
sys.exit(code)
"""


def test_llama_70b_is_planned_for_1024_gpus_in_the_memory_of_its_imports(tmp_path):
    out = tmp_path / "plan.json"
    words = ("plan", *LLAMA_70B, "--cluster", "1024x-h100-infiniband", "--precision", "bf16", "--global-batch", "1024")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words, "--out", str(out)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    plan = json.loads(out.read_text())
    assert sum(plan["ranks_per_node"]) == 1024
    assert (plan["precision"], plan["global_batch"]) == ("bf16", 1024)
    assert len(plan["sections"]) == 82
    prediction = plan["prediction"]
    # 6 operations per parameter and token, on a GPU that achieves 0.7 of 989 TFLOP/s, and attention and memory on top.
    least_s = 6 * 69e9 * 4096 / (0.7 * 989e12)
    compute_s = prediction["step_s_by_phase"]["forward"] + prediction["step_s_by_phase"]["backward"]
    assert least_s < compute_s < 2 * least_s
    assert prediction["peak_bytes"] <= plan["budget_bytes"] == 72 * GIB
    largest_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    assert largest_bytes < 1 * GIB  # most of it torch and transformers
