// Every operation, compiled for the instruction set of the file that includes this, and the table of them.
#pragma once

#include "activation.h"
#include "attention.h"
#include "convert.h"
#include "embed.h"
#include "limits.h"
#include "linear_call.h"
#include "lora.h"
#include "norm.h"
#include "quantize.h"
#include "rotary.h"
#include "sampling.h"
#include "step.h"

namespace headrace::HEADRACE_ISA {

extern const Ops ops = {
    /*name=*/HEADRACE_ISA_NAME,
    /*dealt_rows=*/Multiplier<FormatBf16>::kDealtRows,
    float_to_bf16,
    bf16_to_float,
    float_to_f16,
    f16_to_float,
    exponential,
    embed,
    rms_norm,
    add_rows,
    silu_and_mul,
    add_adapters,
    rotary_kv_write,
    attend,
    quantize_row,
    quantize_row_bf16,
    linear_job,
    step,
    sample,
    read_bytes,
    multiply_registers_of,
};

} // namespace headrace::HEADRACE_ISA
