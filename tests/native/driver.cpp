// Runs the library's C++ under sanitizers; `make sanitize` builds it, once for addresses and once for threads.
#include "check.h"

int main() {
    test_team();
    test_convert();
    test_layers();
    test_linear();
    test_deal();
    test_step();
    std::puts("the CPU library is clean");
}
