"""Where a path leads, by the lists of mounts of several machines, written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama_stack_provider_trl.system.data_dir import DataDir
from llama_stack_provider_trl.system.mounts import Location, MountTable

DISK, OTHER, THIRD = "254:0", "8:16", "0:41"


def table(*lines: str) -> MountTable:
    """Of lines `number parent device root point`, with the rest as the kernel writes it."""
    rest = "rw,relatime shared:1 master:2 - ext4 /dev/vda rw,errors=remount-ro"
    return MountTable.parse("".join(f"{line} {rest}\n" for line in lines).encode())


def located(mounts: MountTable, path: str) -> tuple[str, str]:
    device, place = mounts.locate(Path(path))
    return device, str(place)


def test_a_path_lies_on_the_nearest_mount_above_it() -> None:
    mounts = table(f"27 1 {DISK} / /", f"30 27 {OTHER} / /srv", f"31 30 {DISK} /home/data /srv/shown")
    assert located(mounts, "/home/data/a") == (DISK, "/home/data/a")
    assert located(mounts, "/srv/a/b") == (OTHER, "/a/b")
    assert located(mounts, "/srv/shown") == (DISK, "/home/data")
    assert located(mounts, "/srv/shown/a") == (DISK, "/home/data/a")
    assert located(mounts, "/srv/shownot") == (OTHER, "/shownot")


def test_spaces_and_other_octal_numbers_are_read_as_the_kernel_writes_them() -> None:
    mounts = table(
        f"27 1 {DISK} / /",
        rf"30 27 {OTHER} /a\040b /mnt/two\040words\011tab",
        rf"31 27 {OTHER} /c /mnt/line\012feed\134040",
        "32 27 8:32 / /mnt/carriage\rreturn",
    )
    assert located(mounts, "/mnt/two words\ttab/x") == (OTHER, "/a b/x")
    assert located(mounts, "/mnt/line\nfeed\\040/x") == (OTHER, "/c/x")
    assert located(mounts, "/mnt/carriage\rreturn/x") == ("8:32", "/x")
    assert mounts.below(Path("/mnt"))[0] == Path("/mnt/two words\ttab")


def test_a_mount_hides_those_that_were_there_before() -> None:
    stacked = table(f"27 1 {DISK} / /", f"30 27 {OTHER} / /mnt", f"31 30 {THIRD} / /mnt")
    assert located(stacked, "/mnt/x") == (THIRD, "/x")
    hidden = table(f"27 1 {DISK} / /", f"30 27 {OTHER} / /mnt/deep", f"31 27 {THIRD} / /mnt")
    assert located(hidden, "/mnt/deep/x") == (THIRD, "/deep/x")
    assert hidden.below(Path("/")) == [Path("/mnt")]
    nested = table(f"27 1 {DISK} / /", f"31 27 {THIRD} / /mnt", f"30 31 {OTHER} / /mnt/deep")
    assert located(nested, "/mnt/deep/x") == (OTHER, "/x")
    assert nested.below(Path("/")) == [Path("/mnt"), Path("/mnt/deep")]


def test_the_options_of_one_mount_are_its_own() -> None:
    mounts = MountTable.parse(
        b"27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        b"30 27 254:0 /home /ro ro,nosuid,relatime - ext4 /dev/vda rw\n"  # no optional fields
    )
    assert [sorted(mount.options) for mount in mounts.mounts] == [["relatime", "rw"], ["nosuid", "relatime", "ro"]]
    assert located(mounts, "/ro/a") == (DISK, "/home/a")


def test_a_path_without_a_mount_is_its_own_location() -> None:
    assert located(MountTable([]), "/a/b") == ("", "/a/b")
    in_a_chroot = table(f"40 31 {OTHER} / /proc")
    assert located(in_a_chroot, "/a/b") == ("", "/a/b")
    assert located(in_a_chroot, "/proc/1") == (OTHER, "/1")
    own_parent = table("1 1 0:2 / /", f"27 1 {DISK} / /")
    assert located(own_parent, "/a") == (DISK, "/a")


def test_a_location_is_within_those_above_it_on_the_same_file_system() -> None:
    place = Location(DISK, Path("/data"))
    assert Location(DISK, Path("/data")).is_within(place)
    assert Location(DISK, Path("/data/a/b")).is_within(place)
    assert not Location(DISK, Path("/database")).is_within(place)
    assert not Location(OTHER, Path("/data/a")).is_within(place)


CASES = {
    # On a machine with one disk and: (mounts, path, whether it is ours, whether a job may have it).
    "a part deep in it": (["30 27 {disk} {data}/jobs/a/attempts /shown"], "/shown/1", True, False),
    "a parent": (["30 27 {disk} {above} /shown"], "/shown/data/audit", True, False),
    "a parent, and what it contains": (["30 27 {disk} {above} /shown"], "/shown", False, False),
    "a parent, and results": (["30 27 {disk} {above} /shown"], "/shown/data/checkpoints/a", False, True),
    "a parent, and what lies beside": (["30 27 {disk} {above} /shown"], "/shown/beside", False, True),
    "below the directory that a job requests": (["30 27 {disk} {data}/audit /asked/a/b"], "/asked", False, False),
    "the whole, below the directory of a job": (["30 27 {disk} {above} /asked/a/b"], "/asked/a", False, False),
    "another directory below that of a job": (["30 27 {disk} /elsewhere /asked/a/b"], "/asked", False, True),
    "itself from elsewhere": (
        ["30 27 {other} /x/trl {data}", "31 27 {other} / /shown"],
        "/shown/x/trl/jobs",
        True,
        False,
    ),
    "itself, contained elsewhere": (
        ["30 27 {other} /x/trl {data}", "31 27 {other} / /shown"],
        "/shown/x",
        False,
        False,
    ),
    "a part from elsewhere": (["30 27 {other} /x {data}/jobs", "31 27 {other} / /shown"], "/shown/x/a", True, False),
    "a deep part from elsewhere": (
        ["30 27 {other} /x {data}/datasets/registry", "31 27 {other} / /shown"],
        "/shown/x/a",
        True,
        False,
    ),
    "results from elsewhere": (
        ["30 27 {other} /x {data}/checkpoints", "31 27 {other} / /shown"],
        "/shown/x/a",
        False,
        True,
    ),
    "a disk for the results of one job": (
        ["30 27 {other} / {data}/checkpoints/a"],
        "{data}/checkpoints/a",
        False,
        True,
    ),
    "ours in the results": (["30 27 {disk} {data}/audit {data}/checkpoints/a"], "{data}/checkpoints/a/x", True, False),
    "another disk": (["30 27 {other} {data} /shown"], "/shown/audit", False, True),
}


@pytest.mark.parametrize("case", CASES)
def test_what_mounts_show_of_a_data_directory_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    lines, path, is_ours, is_free = CASES[case]
    names = {"disk": DISK, "other": OTHER, "data": tmp_path / "data", "above": tmp_path}
    mounts = table(f"27 1 {DISK} / /", *(line.format(**names) for line in lines))
    monkeypatch.setattr(MountTable, "read", lambda: mounts)
    data_dir = DataDir(tmp_path / "data")
    asked = Path(path.format(**names))
    assert (data_dir.is_ours(asked), data_dir.is_free(asked)) == (is_ours, is_free)
