"""The text of nccl-tests becomes a measured collective."""

import pytest

from ir.errors import UsageError
from ir.nccl_tests import read_nccl_tests

RANKS = "\n".join(
    f"#  Rank {rank:2d} Group  0 Pid  {4000 + rank} on   node{rank // 4} device {rank % 4:2d} "
    f"[0x{rank:02x}] Some GPU"
    for rank in range(8)
)
HEADING = """
#                                                              out-of-place             in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)
"""
ROWS = """\
           0             0     float     sum      -1     0.05    0.00    0.00      0     0.05
        1024           256     float     sum      -1    28.50    0.04    0.06      0    28.31
     1048576        262144     float     sum      -1    61.20   17.13   29.98      0    60.90
   134217728      33554432     float     sum      -1   1012.4  132.57  232.00      0   1011.0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 87.35
"""
TEXT = f"# Collective test starting: all_reduce_perf\n# Using devices\n{RANKS}\n{HEADING}{ROWS}"
OLD = TEXT.replace("type   redop    root", "type").replace("float     sum      -1", "float")


@pytest.mark.parametrize("text", [TEXT, OLD])
def test_sizes_and_out_of_place_times_are_read(text: str) -> None:
    read = read_nccl_tests(text, "out.txt")
    found = read.collective
    assert (read.on_hosts, read.devices, read.notes) == ((4, 4), ("Some GPU",), ())
    assert (found.op, found.members, found.members_near) == ("all_reduce", 8, 4)
    assert found.curve.sizes == (1024.0, 1048576.0, 134217728.0)
    assert found.curve.seconds == pytest.approx((28.5e-6, 61.2e-6, 1012.4e-6))


def test_the_file_name_says_the_program_where_the_text_does_not() -> None:
    text = TEXT.replace("all_reduce_perf", "")
    assert read_nccl_tests(text, "alltoall_8.log").collective.op == "all_to_all"
    with pytest.raises(UsageError, match="which collective"):
        read_nccl_tests(text, "out.txt")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (RANKS, "", "how many ranks"),
        ("size         count", "bytes        count", "no heading"),
        ("61.20", "n/a", "no time"),
        (ROWS, "", "no rows"),
        ("61.20", "0", "line 17: the time 0 is not above 0"),
        ("61.20", "nan", "line 17: the time nan"),
        ("61.20", "-3", "line 17: the time -3"),
        ("29.98      0", "29.98     17", "line 17: 17 wrong results at 1048576 bytes"),
        ("values : 0 OK", "values : 31 FAILED", "line 19: .*31 FAILED"),
        ("sum      -1   1012.4  132.57  232.00      0   1011.0", "", "line 18: .* 3 of 10 columns"),
        ("Rank  5", "Rank  0", "line 8: rank 0 where rank 5"),
    ],
)
def test_what_is_no_such_output_is_refused(old: str, new: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_nccl_tests(TEXT.replace(old, new), "out.txt")


@pytest.mark.parametrize("prefix", ["[1,0]<stdout>:", "[prterun-a-17@1,0]<stdout>:", "0: "])
def test_prefixes_of_launchers_are_stripped(prefix: str) -> None:
    tagged = "\n".join(prefix + line for line in TEXT.splitlines())
    assert read_nccl_tests(tagged, "out.txt") == read_nccl_tests(TEXT, "out.txt")


def test_what_is_taken_otherwise_is_said() -> None:
    again = TEXT.replace("134217728  ", "  1048576  ").partition("# Out of")[0]
    read = read_nccl_tests(again, "out.txt")
    assert read.collective.curve.at(2**20) == pytest.approx(1012.4e-6)
    assert "first 1048576 bytes); the last of them counts" in read.notes[0]
    assert "(line 18, 1048576 bytes)" in read.notes[1]
