"""Memory of a GPU, or what stands for it, for calls on raw pointers."""

import numpy as np


class HostMemory:
    """NumPy's memory, for an emulated driver."""

    device, stream = 0, None

    def upload(self, array):
        return array.copy()

    def download(self, block):
        return block

    def address(self, block):
        return block.ctypes.data

    def workspace(self, doubles):
        return self.upload(np.full(doubles, np.nan))


class TorchMemory:
    """Memory of torch's current device, used on its current stream."""

    def __init__(self, torch, poison=True):
        self.torch = torch
        self.device = torch.cuda.current_device()
        self.stream = torch.cuda.current_stream().cuda_stream
        self.poison = poison

    def upload(self, array):
        return self.torch.from_numpy(array).to("cuda")

    def download(self, block):
        return block.cpu().numpy()

    def address(self, block):
        return block.data_ptr()

    def workspace(self, doubles):
        if self.poison:
            return self.upload(np.full(doubles, np.nan))
        return self.torch.empty(doubles, dtype=self.torch.float64, device="cuda")


class Buffer:
    """An array in device memory, `shift` values off an aligned address, between two guards."""

    GUARD = 256  # bytes
    PATTERN = 0x5B

    def __init__(self, memory, array, shift=0):
        self.memory, self.dtype, self.shape = memory, array.dtype, array.shape
        self.start = self.GUARD + shift * array.itemsize
        self.end = self.start + array.nbytes
        data = np.full(self.end + self.GUARD, self.PATTERN, np.uint8)
        data[self.start : self.end] = np.frombuffer(array.tobytes(), np.uint8)
        self.block = memory.upload(data)
        self.address = memory.address(self.block) + self.start

    def read(self):
        """Return the array, and whether the guards are as they were."""
        data = self.memory.download(self.block)
        array = np.frombuffer(data[self.start : self.end].tobytes(), self.dtype)
        guards = np.concatenate([data[: self.start], data[self.end :]])
        return array.reshape(self.shape), bool((guards == self.PATTERN).all())
