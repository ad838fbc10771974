// The linear operation called alone: which epilogue, and where its results go.
#pragma once

#include "linear.h"
#include "linear_job.h"

namespace headrace::HEADRACE_ISA {

template <class Epilogue> void run_linear(Team& team, const LinearJob& job, const Epilogue& epilogue) {
    team.run([&](int worker) {
        Ahead nothing;
        if (job.bias) {
            linear(team, worker, job.weights, job.x, job.rows, AddBias<Epilogue>{job.bias, epilogue}, nothing);
        } else {
            linear(team, worker, job.weights, job.x, job.rows, epilogue, nothing);
        }
    });
}

inline void run_best(Team& team, const LinearJob& job) {
    std::vector<Best> best(size_t(team.size() * job.rows), Best::none());
    team.run([&](int worker) {
        Ahead nothing;
        linear(team, worker, job.weights, job.x, job.rows, KeepBest{best.data() + worker * job.rows}, nothing);
    });
    for (int64_t row = 0; row < job.rows; row++) {
        Best all = Best::none();
        for (int worker = 0; worker < team.size(); worker++) {
            const Best& one = best[size_t(worker * job.rows + row)];
            all.take(one.value, one.index);
        }
        static_cast<Best*>(job.to)[row] = all;
    }
}

inline void linear_job(Team& team, const LinearJob& job) {
    float* floats = static_cast<float*>(job.to);
    uint16_t* halves = static_cast<uint16_t*>(job.to);
    switch (job.then) {
    case Then::kStoreFloat: return run_linear(team, job, StoreFloat{floats, job.to_stride});
    case Then::kStoreBf16: return run_linear(team, job, StoreBf16{halves, job.to_stride});
    case Then::kAddFloat: return run_linear(team, job, AddFloat{floats, job.to_stride});
    case Then::kSiluMultiplyFloat:
        return run_linear(team, job, SiluMultiply<float>{floats, job.to_stride, job.columns});
    case Then::kSiluMultiplyBf16:
        return run_linear(team, job, SiluMultiply<uint16_t>{halves, job.to_stride, job.columns});
    case Then::kBest: return run_best(team, job);
    }
}

} // namespace headrace::HEADRACE_ISA
