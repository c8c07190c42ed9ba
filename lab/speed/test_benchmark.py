"""The part of benchmark.py that uses every credit function: it must know what each of them needs.

Run it:  python -m pytest lab/speed/test_benchmark.py
"""
from lab.speed import benchmark
from methods import MITIGATIONS


def test_every_credit_function_is_timed():
    """Guards against a head that a function needs and the benchmark does not have."""
    bench = benchmark.Benchmark(1)
    benchmark.credit(bench)
    assert [row["what"] for row in bench.rows[2:]] == [f"credit of {name}" for name in MITIGATIONS]
    assert all(row["value"] > 0 for row in bench.rows)
