"""The binding of the driver API: signatures, layouts, errors."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
from cuda_rig import NVIDIA_HEADERS, StandIn, build_stand_in

from aiokvoffload.devices.cuda_driver import BATCH_PROTOTYPE, PROTOTYPES, CopyAttributes, CudaDriver
from aiokvoffload.devices.cuda_errors import STICKY_CODES, CudaError, remedy_for

CUDA_HEADER = NVIDIA_HEADERS / "cuda.h"
SCALARS = {
    "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "size_t": ctypes.c_size_t,
    "cuuint64_t": ctypes.c_uint64,
    "CUdeviceptr": ctypes.c_uint64,
    "CUdeviceptr_v1": ctypes.c_uint,
    "CUdevice": ctypes.c_int,
    "CUresult": ctypes.c_int,
    "CUdevice_attribute": ctypes.c_int,
    "CUstreamCaptureMode": ctypes.c_int,
    "CUcontext": ctypes.c_void_p,
    "CUstream": ctypes.c_void_p,
    "CUevent": ctypes.c_void_p,
}

OLD_FORMS = {"cuEventElapsedTime"}
"""Where the form of before is used, because drivers before CUDA 12.8 have no other."""


def cuda_header() -> str:
    if not CUDA_HEADER.exists():
        pytest.skip(f"there is no {CUDA_HEADER} to compare with")
    return CUDA_HEADER.read_text(errors="replace")


def prototypes_in(header: str, name: str) -> list[tuple[type, ...]]:
    """Return the argument types of every declaration of a function."""
    found = re.findall(rf"^\s*CUresult CUDAAPI {name}\(([^)]*)\);", header, re.MULTILINE)
    return [tuple(ctype_of(argument) for argument in arguments.split(",")) for arguments in found]


def ctype_of(argument: str) -> type:
    if "*" in argument:
        return ctypes.c_void_p
    return SCALARS[argument.strip().rsplit(" ", 1)[0]]


@pytest.mark.parametrize("name", PROTOTYPES)
def test_signatures_are_those_of_nvidias_header(name: str) -> None:
    header = cuda_header()
    plain = re.sub(r"_v\d$", "", name)
    renamed = re.search(rf"^#define {plain}\s+.*?({plain}_v\d)\)?$", header, re.MULTILINE)
    current = renamed.group(1) if renamed else plain
    assert name == current or name in OLD_FORMS
    assert PROTOTYPES[name] in prototypes_in(header, plain)


def test_the_batched_copy_has_the_form_of_cuda_12_8() -> None:
    assert BATCH_PROTOTYPE in prototypes_in(cuda_header(), "cuMemcpyBatchAsync")


def test_the_stand_in_is_declared_as_nvidias_header_declares_the_driver(tmp_path: Path) -> None:
    cuda_header()
    build_stand_in(tmp_path, "-Werror", "-DSTANDIN_NVIDIA_HEADER", f"-I{NVIDIA_HEADERS}")


def test_copy_attributes_are_laid_out_as_in_c() -> None:
    assert ctypes.sizeof(CopyAttributes) == 24
    offsets = [getattr(CopyAttributes, field[0]).offset for field in CopyAttributes._fields_]
    assert offsets == [0, 4, 12, 20]


def test_sticky_codes_are_those_that_the_header_calls_final() -> None:
    header = cuda_header()
    errors = header[header.index("typedef enum cudaError_enum") : header.index("} CUresult;")]
    comments = re.findall(r"/\*\*(.*?)\*/\s*CUDA_\w+\s*=\s*(\d+)", errors, re.DOTALL)
    final = {int(code) for text, code in comments if re.search(r"must\W+be\W+(terminated|destroyed)", text)}
    assert final - STICKY_CODES <= {709}  # a context that is destroyed already
    assert final >= STICKY_CODES


@pytest.mark.parametrize(
    ("code", "remedy"),
    [(2, "ulimit"), (100, "CUDA_VISIBLE_DEVICES"), (700, "restart"), (906, "graph"), (12345, "list of CUresult")],
)
def test_every_error_names_a_remedy(code: int, remedy: str) -> None:
    assert remedy in remedy_for(code)


def test_errors_name_function_code_and_meaning(stand_in: StandIn) -> None:
    driver = stand_in.driver()
    with pytest.raises(CudaError, match=r"^cuStreamDestroy failed with CUDA_ERROR_INVALID_CONTEXT: said .*\(201\); "):
        driver.call("cuStreamDestroy_v2", None)
    assert str(driver.error("cuInit", 4321)).startswith("cuInit failed with an unknown error (4321); see")


@pytest.mark.parametrize(("version", "has_batches"), [(11080, False), (12070, False), (12080, True), (13000, True)])
def test_batches_are_there_from_cuda_12_8_on(stand_in: StandIn, version: int, has_batches: bool) -> None:
    stand_in.set_driver_version(version)
    driver = stand_in.driver()
    assert driver.version == version
    assert (driver.batched_copy is not None) is has_batches


def test_a_library_without_the_newest_entry_point_is_an_old_driver(
    stand_in_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiokvoffload.devices.cuda_driver._OPTIONAL", frozenset({"cuNothing"}))
    monkeypatch.setattr("aiokvoffload.devices.cuda_driver.PROTOTYPES", {**PROTOTYPES, "cuNothing": ()})
    driver = CudaDriver(stand_in_library)
    assert driver.batched_copy is not None
    with pytest.raises(KeyError):
        driver.call("cuNothing")
