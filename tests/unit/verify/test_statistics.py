from __future__ import annotations

import pytest

from k3stack.verify.statistics import clustered, wilson


def test_wilson_against_published_values() -> None:
    """81 of 263: 0.2553 to 0.3662; 0 of 20: 0 to 0.1611 (Newcombe 1998, table I)."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


def test_independent_questions_get_wilsons_interval() -> None:
    right = [i % 4 != 0 for i in range(200)]
    assert clustered(right, list(range(200))) == pytest.approx(wilson(150, 200))


def test_alike_questions_count_as_few() -> None:
    """Twenty documents, each all right or all wrong: as good as twenty questions."""
    right = [group < 15 for group in range(20) for _ in range(16)]
    groups = [group for group in range(20) for _ in range(16)]
    low, high = clustered(right, groups)
    few, many = wilson(15, 20), wilson(240, 320)
    assert low == pytest.approx(few[0], abs=0.01) and high == pytest.approx(few[1], abs=0.01)
    assert high - low > 3 * (many[1] - many[0])


def test_all_right_is_no_certainty() -> None:
    assert clustered([True] * 320, [i // 16 for i in range(320)]) == pytest.approx(wilson(20, 20))
