"""What is requested of Slurm, and what its answers mean; its commands are played."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

import pytest

from llama_stack_provider_trl_remote.nodes.pools.base import AgentStart, Given, PoolOrder, PoolRefusal, PoolUnavailable
from llama_stack_provider_trl_remote.nodes.pools.commands import Ran
from llama_stack_provider_trl_remote.nodes.pools.slurm import SlurmPool, run_command
from tests.fakes import FakeClock

ORDER = PoolOrder("abc", ("gpu-abc-0", "gpu-abc-1"), "trl-abc")


class Commands:
    """A Slurm cluster."""

    def __init__(self) -> None:
        self.jobs: list[str] = []
        self.called: list[str] = []
        self.script = ""
        self.fails: dict[str, str] = {}
        self.clock = FakeClock()

    def __call__(self, argv: Sequence[str], text: str) -> Ran:
        self.called.append(" ".join(argv))
        if why := self.fails.get(argv[0]):
            return Ran(1, "", why)
        if argv[0] == "sbatch":
            self.script = text
            self.jobs.append("7|PENDING|Resources")
        if argv[0] == "scancel" and "--signal=USR1" not in argv:
            self.jobs = [job for job in self.jobs if not job.startswith(argv[1])]
        return Ran(0, "\n".join(self.jobs), "")


@pytest.fixture
def slurm() -> Commands:
    return Commands()


@pytest.fixture
def pool(slurm: Commands) -> SlurmPool:
    agent = AgentStart("http://10.0.0.1:8322", "/etc/trl token", labels={"pool": "gpu's"})
    return SlurmPool(agent, ["--partition=gpu"], 90, slurm, slurm.clock)


def test_an_order_is_one_batch_job_however_often_it_is_requested(pool: SlurmPool, slurm: Commands) -> None:
    assert pool.choose("abc", 2, []) == "trl-abc"
    assert pool.observe(ORDER).given is Given.nothing
    pool.request(ORDER)
    pool.request(ORDER)
    assert [call for call in slurm.called if call.startswith("sbatch")] == ["sbatch --parsable --partition=gpu"]
    assert all("--name=trl-abc" in call for call in slurm.called if call.startswith("squeue"))


def test_the_batch_job_starts_an_agent_on_each_node_and_warns_it(pool: SlurmPool) -> None:
    script = pool.script(ORDER)
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    options = re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)
    assert options == [
        *(
            "--job-name=trl-abc",
            "--nodes=2",
            "--ntasks-per-node=1",
            "--exclusive",
            "--no-requeue",
            "--signal=B:USR1@90",
        ),
    ]
    # What srun starts, on a node: the token is in no command line.
    (start,) = re.findall(r"^srun --kill-on-bad-exit=0 --ntasks-per-node=1 (.*) &$", script, re.MULTILINE)
    started = (
        start.replace("exec trl-remote", "printf %s\\\\n")
        .replace('"$HOME"/.llama/trl-pool', "$T")
        .replace("'/etc/trl", "'/nowhere/trl")
    )
    assert "http://10.0.0.1:8322" in started
    assert "--name gpu-abc-$SLURM_PROCID" in started
    assert 'read -r host pid < "$HOME"/.llama/trl-pool/gpu-abc-$SLURM_PROCID/pid && kill -USR1 $pid' in script


@pytest.mark.parametrize(
    ("listed", "given", "message"),
    [
        (["7|PENDING|Resources"], Given.pending, "Slurm job 7 is PENDING (Resources)"),
        (["7|CONFIGURING|None"], Given.pending, "CONFIGURING"),
        (["7|RUNNING|None"], Given.all, "Slurm job 7"),
        (["7|COMPLETING|None"], Given.pending, "ends its processes"),
        (["7|TIMEOUT|TimeLimit"], Given.nothing, "Slurm job 7: TIMEOUT"),
        (["7|CANCELLED|None"], Given.nothing, "Slurm job 7: CANCELLED"),
        (["7|NODE_FAIL|None", "8|RUNNING|None"], Given.all, "Slurm job 8"),
        ([], Given.nothing, ""),
    ],
)
def test_states_of_batch_jobs(pool: SlurmPool, slurm: Commands, listed: list[str], given: Given, message: str) -> None:
    slurm.jobs = listed
    seen = pool.observe(ORDER)
    assert seen.given is given
    assert message in seen.message


def test_agents_leave_before_their_batch_job_is_cancelled_and_what_has_ended_stays(
    pool: SlurmPool, slurm: Commands
) -> None:
    slurm.jobs = ["6|TIMEOUT|TimeLimit", "7|RUNNING|None"]
    leave = "scancel --batch --signal=USR1 7"
    for seconds, expected in ((0, [leave]), (25, [leave]), (10, [leave, "scancel 7"]), (10, [leave, "scancel 7"])):
        slurm.clock.advance(seconds)
        pool.release(ORDER)
        assert [call for call in slurm.called if call.startswith("scancel")] == expected


def test_what_waits_is_cancelled_at_once(pool: SlurmPool, slurm: Commands) -> None:
    pool.request(ORDER)
    pool.release(ORDER)
    assert slurm.called[-1] == "scancel 7"


def test_a_controller_that_is_away_x_from_a_request_that_it_refuses(pool: SlurmPool, slurm: Commands) -> None:
    slurm.fails["sbatch"] = (
        "sbatch: error: invalid partition specified: gpu\nsbatch: error: Batch job submission failed"
    )
    with pytest.raises(PoolRefusal, match=r"^sbatch: invalid partition specified: gpu; Batch job submission failed$"):
        pool.request(ORDER)
    slurm.fails["squeue"] = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    for call in (pool.request, pool.observe, pool.release):
        with pytest.raises(PoolUnavailable, match="Unable to contact slurm controller"):
            call(ORDER)


def test_commands_that_are_missing_are_named() -> None:
    with pytest.raises(PoolUnavailable, match="there is no no-such-command here: install Slurm's commands"):
        run_command(["no-such-command"], "")
    assert run_command(["cat"], "text") == Ran(0, "text", "")
