"""Builds the native kernels with the package. Everything else stands in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "tessella_p2p.stages.native._kernels",
            ["tessella_p2p/stages/native/kernels.c"],
            depends=[
                f"tessella_p2p/stages/native/{name}.h" for name in ("kernels", "vectors_avx2", "vectors_portable")
            ],
            # Multiplications and additions are fused where the source says so, and nowhere else: that is what makes the bits the same.
            extra_compile_args=["-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-pthread"],
            extra_link_args=["-pthread", "-lm"],
            optional=True,
        )
    ]
)
