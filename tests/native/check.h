// One macro and the list of tests: what a driver for sanitizers needs.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            std::fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition);                              \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (false)


void test_team();
void test_convert();
void test_layers();
void test_linear();
void test_deal();
void test_step();
