"""Documented tables equal the output of their scripts or the raw runs, and name what exists."""

import csv
import inspect
import json
import re
import statistics
from collections import defaultdict

import pytest

from benchmarks import scaling, tables
from ppo_lightning import PPO, MLPAgent, RolloutDataModule
from ppo_lightning.commands.recipes import bundled_recipes, bundled_tasks
from ppo_lightning.experiments.report import PUBLISHED, read_csv
from tests.helpers import ROOT

DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks/results"
BENCHMARKS = ROOT / "benchmarks"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(BENCHMARKS.glob("*.md"))]
LABELS = {"recipe", "env_id", "program", "task", "mujoco", "critic", "arm", "opponent", "deterministic"}
LABELS |= {"group", "change", "series"}
NUMBER = r"-?\d+(?:\.\d+)?"


@pytest.mark.parametrize(
    ("script", "flags", "page"),
    [
        (tables, ["candidates", "selection"], BENCHMARKS / "best.md"),
        (tables, ["ppo_or_sac"], DOCS / "off-policy.md"),
        (tables, ["rpo"], BENCHMARKS / "measurements.md"),
        (scaling, ["--table"], BENCHMARKS / "measurements.md"),
    ],
)
def test_a_documented_table_is_that_of_its_script(script, flags, page, capsys):
    script.main(flags)
    for table in capsys.readouterr().out.rstrip("\n").split("\n\n"):
        assert table.count("\n") > 2
        assert table in page.read_text()


def numbers_of(row):
    """Return the measurements of a run by name."""
    numbers = {}
    for name, value in row.items():
        if name not in LABELS and re.fullmatch(r"-?\d+\.?\d*(e-?\d+)?", value or ""):
            numbers[name] = float(value)
    if "wins" in row:
        wins, draws, losses = (numbers[name] for name in ("wins", "draws", "losses"))
        numbers["score"] = (wins + draws / 2) / (wins + draws + losses)
    return numbers


@pytest.fixture(scope="module")
def series():
    """Return each measurement of the runs that differ in seeds only. Of a repeated run, the last counts."""
    found = defaultdict(dict)
    for path in {*RESULTS.rglob("*runs.csv"), *RESULTS.glob("*.csv"), *RESULTS.glob("[bs]*/*.csv")}:
        if not path.stem.endswith("curves"):
            for row in csv.DictReader(path.open()):
                labels = [row[name] for name in row if name in LABELS]
                group = [re.sub(r"-(seed)?\d+$", "", label) for label in labels]
                for name, value in numbers_of(row).items():
                    found[path, name, *group][*labels, row.get("seed")] = value
    runs = [[*values.values()] for values in found.values()]
    timed = json.loads((RESULTS / "time_to_return.json").read_text())["runs"]
    return runs + [[run["seconds"] for run in program] for program in timed.values()]


def is_printed(value, text):
    return abs(value - float(text)) <= 0.5 * 10.0 ** -len(text.partition(".")[2]) + 1e-9


def test_printed_means_and_lists_are_those_of_recorded_runs(series):
    """With the standard deviation of a sample."""
    known = [(float(row["mean"]), float(row["std"])) for row in read_csv(PUBLISHED) if row["std"]]
    known += [(statistics.mean(runs), statistics.stdev(runs)) for runs in series if len(runs) > 1]
    unknown = []
    for page in PAGES:
        text = page.read_text()
        for mean, spread in re.findall(rf"({NUMBER}) ± ({NUMBER})", text):
            if not any(is_printed(m, mean) and is_printed(s, spread) for m, s in known):
                unknown.append(f"{page.name}: {mean} ± {spread}")
        for listed in re.findall(r"(?<![\d.\[])-?\d+\.\d+(?:, -?\d+\.\d+){2,}(?!\])", text):
            cells = listed.split(", ")
            if not any(len(runs) == len(cells) and all(map(is_printed, runs, cells)) for runs in series):
                unknown.append(f"{page.name}: {listed}")
    assert not unknown, "\n".join(unknown)


def throughputs(content, place=()):
    """Yield the series of a file of timings with their places in the file."""
    if isinstance(content, dict):
        for name, part in content.items():
            yield from throughputs(part, (*place, name))
    elif isinstance(content, list):
        runs = [run["sps"] if isinstance(run, dict) and "sps" in run else run for run in content]
        if runs and all(isinstance(run, int | float) for run in runs):
            yield place, runs
        else:
            yield from throughputs(dict(enumerate(content)), place)


def test_printed_throughputs_are_recorded_runs_or_their_medians():
    recorded = {path: dict(throughputs(json.loads(path.read_text()))) for path in RESULTS.glob("*.json")}
    values = [json.loads(line)["sps"] for line in (RESULTS / "gpu/tensors.jsonl").read_text().splitlines()]
    for runs_by_place in recorded.values():
        values += [value for runs in runs_by_place.values() for value in (*runs, statistics.median(runs))]
    first, second = (recorded[RESULTS / f"speed_avx2{name}.json"] for name in ("", "_again"))
    values += [statistics.median(first[place] + second[place]) for place in first.keys() & second.keys()]
    rounded = {round(value) for value in values}
    unknown = []
    for page in (DOCS / "performance.md", DOCS / "long_runs.md", BENCHMARKS / "measurements.md"):
        for row in re.findall(r"^\| .*\d x \d.*$", page.read_text(), re.MULTILINE):
            printed = re.findall(r"(?<=[|(] )\d{1,3}(?: \d{3})+", row)
            unknown += [f"{row}: {each}" for each in printed if int(each.replace(" ", "")) not in rounded]
    assert not unknown, "\n".join(unknown)


def test_users_of_other_libraries_find_settings_and_recipes_that_exist():
    text = (DOCS / "coming_from.md").read_text()
    owners = {"data": RolloutDataModule, "model": PPO, "model.agent": MLPAgent}
    known = {
        f"{prefix}.{name}" for prefix, owner in owners.items() for name in inspect.signature(owner).parameters
    }
    named = set(re.findall(r"\b(?:data|model)(?:\.\w+)+", text))
    assert len(named) > 25 and named <= known
    cells = re.findall(r"^\| `\w+\.py`.*?\|(.*?)\|", text, re.MULTILINE)
    recipes = set(re.findall(r"`(\w+/\w+)`", " ".join(cells)))
    assert len(recipes) > 15 and recipes <= bundled_recipes().keys() | bundled_tasks().keys()


def test_printed_ratios_are_those_of_recorded_runs():
    """Of throughputs to Stable-Baselines3's and to the floor, run by run; README has their range."""
    rows = re.findall(
        r"^\| (\w+)-?v?\d?, (\d+ x \d+) \| (.+?) \| (.+?) \| (\S+), (\S+) \|$",
        (DOCS / "performance.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) == 5
    medians = []
    for task, size, *printed, floor, other_floor in rows:
        workload = f"{task.lower()}-{size.replace(' ', '')}"
        for files, cell, share in (
            (("speed_avx2.json", "speed_avx2_again.json"), printed[0], floor),
            (("speed_compiled.json",), printed[1], other_floor),
        ):
            series = [json.loads((RESULTS / file).read_text())["runs"][workload] for file in files]
            ours = [run for runs in series for run in runs["ours, compiled"]]
            theirs = [run["sps"] for runs in series for run in runs["stable-baselines3"]]
            ratios = [run["sps"] / sps for run, sps in zip(ours, theirs, strict=True)]
            medians.append(statistics.median(ratios))
            assert cell == f"{medians[-1]:.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
            assert share == f"{statistics.median(run['fraction'] for run in ours):.2f}"
    sentence = f"{min(medians):.1f} (Breakout) to {max(medians):.1f} (HalfCheetah) times the throughput"
    assert sentence in (ROOT / "README.md").read_text()
