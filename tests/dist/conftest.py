"""dist layer: gloo ranks in processes of their own."""

import pytest

from tests.dist.ranks import Pool


@pytest.fixture(scope="session")
def pool():
    pool = Pool()
    yield pool
    pool.close()
