from __future__ import annotations

from headrace.counting import counted


def test_a_count_has_the_words_that_go_with_it() -> None:
    assert [counted(count, "job") for count in range(3)] == ["0 jobs", "1 job", "2 jobs"]
    assert [counted(count, "job waits", "jobs wait") for count in (1, 2)] == ["1 job waits", "2 jobs wait"]
