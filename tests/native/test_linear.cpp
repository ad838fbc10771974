#include "isas.h"

#include "pack.h"

#include <cmath>
#include <vector>

using namespace headrace;

namespace {

struct Aligned {
    explicit Aligned(int64_t bytes) : data(static_cast<uint8_t*>(std::aligned_alloc(64, size_t((bytes + 63) / 64 * 64)))) {}
    ~Aligned() { std::free(data); }
    Aligned(const Aligned&) = delete;
    Aligned& operator=(const Aligned&) = delete;
    uint8_t* data;
};

// Everything has its exact size; a reading or writing past a tail is an error of the address sanitizer.
void multiply(const Ops& ops, Team& team, Format format, int64_t outputs, int64_t inputs, int64_t rows) {
    std::vector<float> floats(size_t(outputs * inputs)), x(size_t(rows * inputs)), result(size_t(rows * outputs));
    for (size_t i = 0; i < floats.size(); i++) floats[i] = float(int(i * 7 % 31) - 15) / 16;
    for (size_t i = 0; i < x.size(); i++) x[i] = float(int(i * 5 % 29) - 14) / 16;
    Weights weights{format, 0, outputs, inputs, nullptr};
    Aligned bytes(weights.total_bytes());
    std::vector<Row> from;
    for (int64_t n = 0; n < outputs; n++) from.push_back({&floats[size_t(n * inputs)], Source::kF32, 0});
    pack(team, weights, from.data(), bytes.data);
    weights.bytes = bytes.data;

    const int group = layout_of(format).scale_inputs;
    const int64_t groups = group ? weights.groups() : 0;
    std::vector<int8_t> values(size_t(rows * groups * group));
    std::vector<float> scales(size_t(rows * groups));
    std::vector<int32_t> offsets(size_t(rows * groups));
    std::vector<uint16_t> halves(x.size());
    Activations activations{reinterpret_cast<const uint8_t*>(x.data()), inputs * 4, nullptr, nullptr};
    if (group) {
        for (int64_t m = 0; m < rows; m++)
            ops.quantize_row(&x[size_t(m * inputs)], inputs, group, &values[size_t(m * groups * group)],
                             &scales[size_t(m * groups)], &offsets[size_t(m * groups)]);
        activations = {reinterpret_cast<const uint8_t*>(values.data()), groups * group, scales.data(), offsets.data()};
    } else if (format == Format::kBf16) {
        ops.float_to_bf16(x.data(), halves.data(), int64_t(x.size()));
        activations = {reinterpret_cast<const uint8_t*>(halves.data()), inputs * 2, nullptr, nullptr};
    }
    ops.linear_job(team, {weights, activations, rows, Then::kStoreFloat, 0, result.data(), outputs, 0, nullptr});

    std::vector<float> row(static_cast<size_t>(inputs));
    for (int64_t n = 0; n < outputs; n++) {
        unpack_row(weights, n, row.data());
        for (int64_t m = 0; m < rows; m++) {
            double sum = 0;
            for (int64_t k = 0; k < inputs; k++) sum += double(row[size_t(k)]) * double(x[size_t(m * inputs + k)]);
            CHECK(std::fabs(sum - double(result[size_t(m * outputs + n)])) < 0.02 * double(inputs));
        }
    }
    std::vector<Best> best(static_cast<size_t>(rows), Best::none());
    ops.linear_job(team, {weights, activations, rows, Then::kBest, 0, best.data(), 0, 0, nullptr});
    for (int64_t m = 0; m < rows; m++) CHECK(best[size_t(m)].value == result[size_t(m * outputs + best[size_t(m)].index)]);
}

} // namespace

void test_linear() {
    Team team(3);
    on_every_isa([&](const Ops& ops) {
        for (Format format : {Format::kF32, Format::kBf16, Format::kInt8, Format::kInt8G32, Format::kU4G32})
            for (int64_t rows : {1, 2, 3, 7, 15})
                for (int64_t outputs : {1, 33, 100})
                    for (int64_t inputs : {2, 34, 130}) multiply(ops, team, format, outputs, inputs, rows);
    });
}
