"""The C code under the sanitizers: random shapes through every kernel, in buffers without a byte to spare, on one to three threads."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tessella_p2p.stages import native

HERE = Path(__file__).parent
COMPILER = shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0])
FLAGS = ["-O0", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-g1", "-Wall", "-Wextra", "-Werror"]


def built(folder: Path, sanitizer: str) -> Path:
    if COMPILER is None:
        pytest.skip("no C compiler")
    empty = folder / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    program = folder / "driver"
    if subprocess.run([COMPILER, sanitizer, empty, "-o", program], capture_output=True, check=False).returncode:
        pytest.skip(f"the compiler has no {sanitizer}")
    kernels = Path(native.__file__).parent
    subprocess.run(
        [
            COMPILER,
            *FLAGS,
            sanitizer,
            "-fno-sanitize-recover=all",
            f"-I{kernels}",
            HERE / "native_driver.c",
            "-o",
            program,
            "-lm",
        ],
        check=True,
    )
    return program


@pytest.mark.parametrize(
    ("sanitizer", "trials"),
    [("-fsanitize=address,alignment,shift,signed-integer-overflow", 5), ("-fsanitize=thread", 2)],
    ids=["memory", "threads"],
)
def test_random_shapes_break_no_rule_of_c_and_give_the_bits_of_plain_c(
    tmp_path: Path, sanitizer: str, trials: int
) -> None:
    program = built(tmp_path, sanitizer)
    done = subprocess.run([program, "1", str(trials)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith(f"{trials} trials")
