import torch

from trainer_svc.host_store import HostStore


def test_tensors_come_back_as_they_were_and_so_do_their_views():
    whole = torch.arange(12, dtype=torch.float32)
    view, other = whole[3:7].view(2, 2), torch.arange(3)
    store = HostStore()
    store.put_out([whole, view, other])
    assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    assert whole.shape == (12,)
    store.bring_in()
    assert whole.tolist() == list(range(12))
    assert view.tolist() == [[3, 4], [5, 6]]
    assert other.tolist() == [0, 1, 2]
    view.fill_(9)
    assert whole[3:7].tolist() == [9, 9, 9, 9]


def test_what_was_written_in_between_counts_the_next_time():
    tensor = torch.zeros(4)
    store = HostStore()
    for number in range(1, 4):
        store.put_out([tensor])
        store.bring_in()
        assert tensor.tolist() == [number - 1] * 4
        tensor.fill_(number)


def test_constant_tensors_are_copied_once():
    tensor = torch.ones(4)
    store = HostStore(constant=True)
    store.put_out([tensor])
    store.bring_in()
    tensor.zero_()
    store.put_out([tensor])
    store.bring_in()
    assert tensor.tolist() == [1] * 4


def test_bringing_in_what_is_not_out_changes_nothing():
    tensor = torch.ones(4)
    store = HostStore()
    store.bring_in()
    store.put_out([tensor])
    store.bring_in()
    store.bring_in()
    assert tensor.tolist() == [1] * 4
