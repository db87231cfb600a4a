// Add a gradient to a residual and select the elements above a threshold, in one pass. A separate library: it compiles
// in a second, so that training ranks need not wait for the other kernels.
#include <cmath>
#include <cstdint>
#include <cstring>

struct ThresholdSelect {    // same layout as in threshold_select.py; owns nothing
    float* values;          // [elements]: the residual, to which the gradient is added
    const float* gradient;  // [elements]; null: values are only read
    int64_t elements, start, stop;
    int32_t* indices;  // [stop - start]: indices of matches, relative to `start`
    float threshold;
};

namespace {

constexpr int64_t GROUP = 32;  // elements tested together: at low densities most groups have no match

void add(float* __restrict values, const float* __restrict gradient, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) values[i] += gradient[i];
}

bool any_match(const float* values, float threshold) {
    int any = 0;
#pragma omp simd reduction(| : any)
    for (int64_t i = 0; i < GROUP; ++i) any |= std::fabs(values[i]) >= threshold;
    return any;
}

// Find the matches among values [first, last) of the range, whose sums are still in the L1 cache.
int64_t find(const float* values, int64_t first, int64_t last, float threshold, int32_t* indices, int64_t count) {
    for (int64_t i = first; i < last; ++i) {
        indices[count] = int32_t(i);  // overwritten unless it is a match
        count += std::fabs(values[i]) >= threshold;
    }
    return count;
}

// Process [begin, end) of the vector; its matches are stored at the offset they would have if all before matched.
int64_t run(const ThresholdSelect& task, int64_t begin, int64_t end, int32_t* indices) {
    int64_t low = begin > task.start ? begin : task.start, high = end < task.stop ? end : task.stop;
    if (low >= high) low = high = end;
    if (task.gradient) {
        add(task.values + begin, task.gradient + begin, low - begin);
        add(task.values + high, task.gradient + high, end - high);
    }
    int64_t count = 0, position = low;
    const float* range = task.values + task.start;
    for (; position + GROUP <= high; position += GROUP) {
        if (task.gradient) add(task.values + position, task.gradient + position, GROUP);
        if (any_match(task.values + position, task.threshold))
            count = find(range, position - task.start, position - task.start + GROUP, task.threshold, indices, count);
    }
    if (task.gradient) add(task.values + position, task.gradient + position, high - position);
    return find(range, position - task.start, high - task.start, task.threshold, indices, count);
}

}  // namespace

// Returns the number of matches; `indices` starts with them, ascending.
extern "C" int64_t smelt_threshold_select(const ThresholdSelect* task, int threads) {
    constexpr int MAX_THREADS = 256;
    int64_t counts[MAX_THREADS];
    threads = threads < MAX_THREADS ? threads : MAX_THREADS;
    auto edge = [&](int part) { return task->elements / threads * part + task->elements % threads * part / threads; };
    auto output = [&](int part) {
        int64_t position = edge(part) - task->start, limit = task->stop - task->start;
        return task->indices + (position < 0 ? 0 : position < limit ? position : limit);
    };
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int part = 0; part < threads; ++part) counts[part] = run(*task, edge(part), edge(part + 1), output(part));
    int64_t total = 0;
    for (int part = 0; part < threads; ++part) {
        std::memmove(task->indices + total, output(part), counts[part] * sizeof(int32_t));
        total += counts[part];
    }
    return total;
}
