#include "screen_types.h"

#include "pack.h"

#include <vector>

namespace headrace {

void measure_screen(Team& team, const Weights& exact, const Weights& screen, float* errors, float* norms) {
    // Sums of so many products in float, here and in the exact head, lose this share of |x| * |w| at most, twice over.
    const double rounding = double(exact.inputs + 64) * 0x1p-23;
    team.run([&](int worker) {
        std::vector<float> whole(size_t(exact.inputs)), rounded(size_t(exact.inputs));
        while (Range mine = team.claim(worker, screen.tiles() * kTileOutputs)) {
            for (int64_t output = mine.begin; output < mine.end; output++) {
                errors[output] = norms[output] = 0;
                if (output >= screen.outputs) continue;
                unpack_row(exact, output, whole.data());
                unpack_row(screen, output, rounded.data());
                double error = 0, norm = 0;
                for (size_t i = 0; i < whole.size(); i++) {
                    const double off = double(whole[i]) - double(rounded[i]);
                    error += off * off;
                    norm += double(rounded[i]) * double(rounded[i]);
                }
                error = std::sqrt(error), norm = std::sqrt(norm);
                errors[output] = float(error + rounding * (error + norm));
                norms[output] = float(norm * (1 + rounding));
            }
        }
    });
}

} // namespace headrace
