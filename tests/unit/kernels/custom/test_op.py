"""Operations as a whole: compiled, registered, called, refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from kernels.custom import (
    ArgumentError,
    CompileFailed,
    CustomOpError,
    NoCompiler,
    ResourceError,
    SignatureError,
    compilers,
    op,
)
from kernels.custom.launch import choose_image
from tests.unit.kernels.custom.conftest import Make
from tests.unit.kernels.custom.sources import (
    ELEMENTS,
    RMS_NORM,
    RMS_NORM_SIGNATURE,
    SILU_AND_MUL,
    SILU_AND_MUL_SIGNATURE,
    SPILLS,
)

DOUBLE = "if (i < n) y[i] = 2 * x[i];"
EXAMPLES = Path(__file__).parents[4] / "examples"


class TestResults:
    @pytest.mark.usefixtures("cuda_compiler")
    def test_the_example_is_torchs_gelu(self) -> None:
        gelu = op.CustomOp(EXAMPLES / "my_gelu.cu")
        x = torch.linspace(-9, 9, 1000).view(10, 100)
        torch.testing.assert_close(gelu(x), functional.gelu(x, approximate="tanh"), rtol=1e-5, atol=1e-6)
        assert set(gelu.resources) == set(op.ARCHITECTURES) or torch.cuda.is_available()
        for used in gelu.resources.values():
            assert 0 < used.registers <= 32
            assert (used.spill_bytes, used.stack_bytes, used.shared_bytes) == (0, 0, 0)

    @pytest.mark.usefixtures("on_cpu_alone")
    def test_rows_in_bfloat16(self, make: Make) -> None:
        silu = make(SILU_AND_MUL, signature=SILU_AND_MUL_SIGNATURE, threads=128, blocks="rows")
        torch.manual_seed(0)
        gate_up = torch.randn(2, 3, 2 * 200, dtype=torch.bfloat16)
        gate, up = gate_up.float().chunk(2, dim=-1)
        wanted = (functional.silu(gate) * up).bfloat16()
        assert silu(gate_up).shape == (2, 3, 200)
        torch.testing.assert_close(silu(gate_up), wanted, rtol=1e-2, atol=1e-2)

    @pytest.mark.usefixtures("on_cpu_alone")
    def test_half_types_by_headers_without_a_toolkit(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compilers, "find_nvcc", lambda: None)
        if not list(compilers.cuda_includes()):
            pytest.skip("no wheel here has CUDA's headers")
        text = SILU_AND_MUL + "// by the wheels' headers"
        silu = make(text, signature=SILU_AND_MUL_SIGNATURE, threads=128, blocks="rows")
        assert silu(torch.ones(2, 6, dtype=torch.bfloat16)).tolist() == [[0.73046875] * 3] * 2

    @pytest.mark.usefixtures("on_cpu_alone")
    def test_barriers_shuffles_and_dynamic_shared_memory(self, make: Make) -> None:
        norm = make(RMS_NORM, signature=RMS_NORM_SIGNATURE, threads=96, blocks="rows", shared_bytes=3 * 4)
        torch.manual_seed(0)
        x, weight = torch.randn(5, 250), torch.randn(250)
        torch.testing.assert_close(norm(x, weight, 0.5), functional.rms_norm(x, (250,), weight, 0.5))

    @pytest.mark.usefixtures("on_cpu_alone")
    def test_torch_takes_it_as_its_own(self, make: Make) -> None:
        norm = make(RMS_NORM, signature=RMS_NORM_SIGNATURE, threads=32, blocks="rows", shared_bytes=4)
        results = torch.library.opcheck(norm.torch_op, (torch.randn(3, 40), torch.randn(40), 1e-6))
        assert set(results.values()) == {"SUCCESS"}
        assert norm(torch.empty(2, 7, 40, device="meta"), torch.empty(40, device="meta"), 1e-6).shape == (2, 7, 40)

    @pytest.mark.usefixtures("on_cpu_alone")
    def test_inputs_of_any_stride_and_of_no_elements(self, body: Make) -> None:
        double = body(DOUBLE)
        x = torch.arange(12.0).view(3, 4).t()
        assert torch.equal(double(x), 2 * x)
        assert double(torch.empty(0, 4)).shape == (0, 4)


@pytest.mark.usefixtures("on_cpu_alone")
class TestCalls:
    def test_a_wrong_type(self, body: Make) -> None:
        with pytest.raises(ArgumentError, match=r"own\.cu: own: x must be torch\.float32, not torch\.float64"):
            body(DOUBLE)(torch.zeros(3, dtype=torch.float64))

    def test_wrong_shapes(self, make: Make) -> None:
        norm = make(RMS_NORM, signature=RMS_NORM_SIGNATURE, threads=32, blocks="rows", shared_bytes=4)
        with pytest.raises(ArgumentError, match=r"weight has shape \[5\], and must have \[width\], rows=3, width=4"):
            norm(torch.zeros(3, 4), torch.zeros(5), 1e-6)
        silu = make(SILU_AND_MUL, signature=SILU_AND_MUL_SIGNATURE, threads=128, blocks="rows")
        with pytest.raises(ArgumentError, match=r"gate_up has shape \[3, 7\], and must have \[\*rows, 2\*inner\]"):
            silu(torch.zeros(3, 7, dtype=torch.bfloat16))

    def test_wrong_arguments(self, make: Make) -> None:
        norm = make(RMS_NORM, signature=RMS_NORM_SIGNATURE, threads=32, blocks="rows", shared_bytes=4)
        x, weight = torch.zeros(3, 4), torch.zeros(4)
        with pytest.raises(ArgumentError, match="it takes 2 tensors, then its numbers"):
            norm(x, 1.0)
        with pytest.raises(ArgumentError, match="it takes 1 numbers behind the tensors, not 0"):
            norm(x, weight)
        with pytest.raises(ArgumentError, match="weight is on meta, the first tensor on cpu"):
            norm(x, weight.to("meta"), 1e-6)


class TestSources:
    @pytest.mark.usefixtures("cuda_compiler")
    def test_an_error_is_told_with_its_line(self, body: Make) -> None:
        with pytest.raises(CompileFailed, match=r'^own\.cu\(3\): error: identifier "z" is undefined'):
            body("y[i] = z;")

    @pytest.mark.usefixtures("on_cpu_alone")
    def test_an_error_that_only_the_cpps_compiler_can_tell(self, body: Make) -> None:
        with pytest.raises(CompileFailed, match=r"^own\.cu:3:.*error: .*z.* was not declared"):
            body("y[i] = z;")

    @pytest.mark.usefixtures("cuda_compiler")
    def test_spills_past_the_limit(self, make: Make) -> None:
        with pytest.raises(
            ResourceError, match=r"own on sm_90 spills \d+ bytes .* and 0 are allowed: .*most_spill_bytes"
        ):
            make(SPILLS)
        allowed = make(SPILLS, most_spill_bytes=1_000_000)
        assert 0 < allowed.resources["sm_90"].spill_bytes <= 1_000_000
        assert allowed.resources["sm_90"].registers == 32

    @pytest.mark.usefixtures("cuda_compiler")
    def test_too_many_registers_for_the_block(self, make: Make) -> None:
        text = SPILLS.replace("__launch_bounds__(1024, 2) ", "")
        with pytest.raises(ResourceError, match=r"takes \d+ registers, and a block of 1024 threads has 64 for each"):
            make(text, threads=1024)

    @pytest.mark.usefixtures("cuda_compiler")
    def test_too_much_shared_memory(self, body: Make) -> None:
        with pytest.raises(
            ResourceError, match=r"own on sm_86 takes 131072 bytes of shared memory, and 101376 are there"
        ):
            body(DOUBLE, shared_bytes=131072, architectures=("sm_86",))

    @pytest.mark.usefixtures("cuda_compiler")
    def test_static_shared_memory_is_counted(self, body: Make) -> None:
        shared = body("__shared__ float s[256]; s[threadIdx.x] = x[i]; __syncthreads(); y[i] = s[255 - threadIdx.x];")
        used = shared.resources["sm_90"].shared_bytes
        assert 1024 <= used <= 2048  # from sm_90 on the system's own KiB may be in it
        assert torch.equal(shared(torch.arange(256.0)), torch.arange(255.0, -1, -1))

    @pytest.mark.usefixtures("cuda_compiler")
    def test_a_layout_that_only_the_compiled_kernel_shows(self, make: Make) -> None:
        text = "typedef double real;\n__global__ void own(const float* x, float* y, real a, int n) {}"
        with pytest.raises(
            SignatureError, match=r"compiled own has parameters of .*\(16, 8\).* signature's are .*\(16, 4\)"
        ):
            make(text, signature="const float x[*n], float y[*n], float a, int n")

    @pytest.mark.usefixtures("on_cpu_alone")
    def test_a_layout_without_a_cuda_compiler(self, make: Make) -> None:
        text = "typedef double real;\n__global__ void own(const float* x, float* y, real a, int n) {}"
        with pytest.raises(
            SignatureError, match=r"own has 4 parameters, of \[8, 8, 8, 4\] bytes, and the signature's 4"
        ):
            make(text, signature="const float x[*n], float y[*n], float a, int n")

    def test_wrong_launches(self, body: Make) -> None:
        with pytest.raises(CustomOpError, match="a block has 1 to 1024 threads, not 2000"):
            body(DOUBLE, threads=2000)
        with pytest.raises(CustomOpError, match="0 to 232448 bytes of shared memory, not -1"):
            body(DOUBLE, shared_bytes=-1)
        with pytest.raises(SignatureError, match="blocks='rows' is no dimension: choose one of n"):
            body(DOUBLE, blocks="rows")


class TestCompilers:
    def test_none_at_all(self, body: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(op, "find_compiler", lambda: None)
        monkeypatch.setattr(op, "find_cpp", lambda: None)
        with pytest.raises(NoCompiler, match=r"there is no compiler.* nvidia-cuda-nvrtc.* g\+\+.* reference="):
            body(DOUBLE)

    def test_the_reference_serves_without_one(
        self, body: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(op, "find_compiler", lambda: None)
        monkeypatch.setattr(op, "find_cpp", lambda: None)
        double = body(DOUBLE, reference=lambda x: x * 3)
        assert torch.equal(double(torch.ones(4)), torch.full((4,), 3.0))
        assert "isn't compiled for GPUs" in caplog.text
        assert "can't run on the CPU: there is no C++ compiler" in caplog.text

    @pytest.mark.usefixtures("on_cpu_alone")
    def test_a_gpu_that_nothing_was_compiled_for(self, body: Make) -> None:
        double = body(DOUBLE)
        assert double.resources == {}
        assert "it wasn't compiled" in (double.obstacle(torch.device("cuda")) or "")
        assert double.obstacle(torch.device("cpu")) is None

    @pytest.mark.usefixtures("cuda_compiler")
    def test_what_the_emulator_lacks_stays_for_gpus(self, body: Make, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            clock = body("y[i] = clock64() + x[i];")
        assert "can't run on the CPU, whose emulator doesn't have all of CUDA" in caplog.text
        assert "sm_90" in clock.resources
        with pytest.raises(NoCompiler, match="it can't run on a CPU"):
            clock(torch.zeros(3))

    @pytest.mark.usefixtures("cuda_compiler")
    def test_an_image_runs_on_its_own_major_version(self, make: Make) -> None:
        made = make(ELEMENTS % DOUBLE, architectures=("sm_80", "sm_86", "sm_90"))
        chosen = {
            capability: image.architecture if (image := choose_image(made._images, capability)) else None
            for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (7, 5))
        }
        assert chosen == {(8, 0): "sm_80", (8, 9): "sm_86", (9, 0): "sm_90", (10, 0): None, (7, 5): None}
