import torch

from tabicl_train.planning.flops import peak_flops


def test_peaks_are_those_of_the_device_and_format(monkeypatch):
    assert peak_flops(torch.device("cpu"), "fp32") is None
    for name, peaks in {"NVIDIA H200": (989e12, 67e12), "Some Other GPU": (None, None)}.items():
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device, name=name: name)
        assert (peak_flops(torch.device("cuda"), "bf16"), peak_flops(torch.device("cuda"), "fp32")) == peaks
