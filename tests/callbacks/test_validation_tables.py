"""The tables of validations and of the test at the end of a run."""

from own_rows import SETTINGS

from priors.dummy import Dummy
from tabicl_train.callbacks.held_out.draws import answer_streams, held_out_streams
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import SYNTHETIC


def test_validation_and_test_tables_are_different_ones(monkeypatch):
    plan, addresses, contents = Dummy.plan, [], []
    monkeypatch.setattr(Dummy, "plan", lambda self, spec, seed: addresses[-1].add(seed[:3]) or plan(self, spec, seed))
    config = compose(SETTINGS)
    for streams in (held_out_streams, answer_streams):
        addresses.append(set())
        contents.append({pack.X.numpy().tobytes() for item in streams(config)[SYNTHETIC] for pack in item.packs})
    validation, test = addresses
    assert len(validation) == len(test) == 12 and not validation & test
    assert not contents[0] & contents[1]
    assert all(seed < 0 for seed, _, _ in validation | test)  # which no step of a run has
