#pragma once

#include "abi.h"
#include "check.h"

// Calls test(ops) for each instruction set that this machine has.
template <class Test> void on_every_isa(const Test& test) {
    int found = 0;
    for (const char* name : {"amx", "avx512", "avx2", "portable"})
        if (const headrace::Ops* ops = headrace_ops(name)) {
            test(*ops);
            found++;
        }
    CHECK(found > 0);
}
