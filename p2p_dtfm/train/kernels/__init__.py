"""Operations on flat fp32 tensors as kernels for CUDA devices, with the bits of their torch twins.

There is one CUDA C source for each idea (`*.cu`). Begin with `choice.launcher_for`; without a
launcher the twins are used. See `docs/decisions/0053-device-kernels.md`.
"""
