"""The planner against published runs, and against runs of this library."""

import pytest
from fivefold import plan
from fivefold.plan import checked, published


def test_predictions_are_within_the_stated_error() -> None:
    """Of 26 published rows the median error is at most 10% and none is above 25%."""
    predictions = [published.predict(run) for run in published.rows()]
    assert len(predictions) == 26
    median, largest = published.errors(predictions)
    assert median <= 0.10 and largest <= 0.25


def test_one_constant_a_gpu_type_fitted_on_one_row() -> None:
    """The rows of FITTED are met to 1%: the constants are what a fit on these rows gives. No other is one of theirs."""
    runs = published.rows()
    assert {runs[n].cluster.gpu.name for n in published.FITTED.values()} == {"A100", "H100"} == set(published.FITTED)
    for number in published.FITTED.values():
        assert abs(published.predict(runs[number]).error) < 0.01
    assert {plan.EFFICIENCY[name] for name in ("H100", "H200", "H800", "H100-96GB")} == {plan.EFFICIENCY["H100"]}


def test_pipeline_is_ahead_of_zero3_and_further_when_gpus_are_doubled() -> None:
    """Narayanan et al. 2021, table 2: ahead by 6% and 24% on few GPUs, by about 70% on twice as many."""
    tflops = [published.predict(run).tflops for run in published.rows()]
    for few, many in (((16, 10), (17, 11)), ((19, 13), (20, 14))):
        ahead, doubled = (tflops[ours] / tflops[zero] - 1 for ours, zero in (few, many))
        assert 0 < ahead < 0.35 and 0.5 < doubled < 0.9


def test_llama_3_s_layouts_are_near_the_top() -> None:
    """Each is within 10% of the best that fits, and among the first 1% of plans; the long one is the best."""
    for number, first in ((22, False), (23, False), (24, True)):
        run = published.rows()[number]
        choices = plan.search(run.model, run.work, run.gpus, run.cluster)
        times = [choice.seconds.total for choice in choices]
        theirs = published.predict(run).seconds.total
        rank = sum(time < theirs * (1 - 1e-9) for time in times)
        assert theirs < 1.1 * times[0] and rank < 0.01 * len(times)
        assert not first or rank == 0


@pytest.mark.parametrize("case", [("tp2", "one_f_one_b", 1), ("pp2", "interleaved", 2), ("dp2,pp2,tp2", "gpipe", 1)])
def test_a_run_of_this_library_takes_and_keeps_what_the_planner_says(case: tuple) -> None:
    """Time within 5% of the replay of the run, memory within 10% of the ledger's bytes on the fullest rank."""
    found = checked.compare(*case)
    assert abs(found["time_error"]) < 0.05 and abs(found["memory_error"]) < 0.10


def test_every_axis_is_compared_with_a_run() -> None:
    """The bench compares layouts of each axis, and each schedule that the trainer shares with the planner."""
    text = " ".join(f"{layout} {schedule}" for layout, schedule, _ in checked.LAYOUTS)
    assert all(axis in text for axis in ("dp", "tp", "cp", "pp", "ep", "gpipe", "interleaved", "one_f_one_b"))


def test_a_row_of_another_source_can_be_read() -> None:
    """Rows that are not in the file: a GPT of Korthikanti et al. 2022 (530B on 280 A100, 56.0% MFU), within 10%."""
    row = dict.fromkeys(("tflops_per_gpu", "schedule"), "") | {
        "source": "Korthikanti 2022", "table": "5", "model": "GPT", "params_billion": "529.6", "layers": "105",
        "hidden": "20480", "heads": "128", "kv_heads": "128", "gpu": "A100-80GB", "gpus": "280", "tp": "8", "cp": "1",
        "pp": "35", "dp": "1", "zero_stage": "0", "sequence": "2048", "global_batch_sequences": "280",
        "microbatch": "1", "recompute": "selective", "percent_of_peak": "56.0",
    }  # fmt: skip
    assert abs(published.predict(published.read(row)).error) < 0.10
