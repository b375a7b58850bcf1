"""Fakes the CUDA device in torch 2.11."""

from ebbtide.features.dryrun.torch_2_13 import backend as torch_2_13


class Backend(torch_2_13.Backend):
    """The backend of torch 2.13, and what differs here."""

    device_attribute = "fake_device"
