/* Preloaded into a process, this sets its wall clock CLOCK_AHEAD_S seconds ahead of the machine's, or behind it. */
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long ahead_s;

__attribute__((constructor)) static void read_ahead(void) {
    const char *told = getenv("CLOCK_AHEAD_S");
    ahead_s = told ? atol(told) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    int status = (int)syscall(SYS_clock_gettime, clock, at);
    if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += ahead_s;
    return status;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    int status = (int)syscall(SYS_gettimeofday, at, zone);
    if (status == 0 && at) at->tv_sec += ahead_s;
    return status;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
