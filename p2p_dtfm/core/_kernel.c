/* The inner loop of the paper-cost solver: simulated annealing in 64-bit integers.
 *
 * paper_anneal.py holds the same algorithm in Python, line for line; both must give equal results
 * for equal arguments (tests/core/test_paper_solver.py compares them). Integers only, no library
 * routine beyond memory, so that the result is the same with any compiler on any machine.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MOST_REPLICAS 64

typedef struct {
    int stages, replicas, peers;
    const int64_t *pair_dp, *pair_pp;
    int64_t *member;   /* member[stage * replicas + slot] is a peer */
    int64_t *row;      /* row[peer]: its data-parallel sum within its stage */
    int64_t *group;    /* group[stage]: largest row of the stage */
    int64_t *edge;     /* edge[stage]: bottleneck between stage and stage + 1 */
    int64_t *trial;    /* row sums of the two stages that a swap touches */
    const int64_t *kind; /* kind[peer]: peers of one kind are interchangeable */
    uint64_t random;
} State;

static uint64_t next_u64(State *state) {
    uint64_t mixed = (state->random += 0x9E3779B97F4A7C15ULL);
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ULL;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBULL;
    return mixed ^ (mixed >> 31);
}

static int below(State *state, uint64_t bound) {
    return (int)(((next_u64(state) >> 32) * bound) >> 32);
}

/* Largest pair of the perfect matching between two stages whose largest pair is smallest.
 *
 * Rows are matched one after another. From an unmatched row an alternating tree grows over pairs
 * within `limit`; when it can grow no more, the limit rises to the smallest pair that leaves the
 * tree. Any limit reached this way is needed, so the last one is the answer. Once it exceeds
 * `most` its exact value does not matter.
 */
static int64_t bottleneck(const State *state, const int64_t *left, const int64_t *right,
                          int64_t most) {
    const int count = state->replicas;
    int owner[MOST_REPLICAS], parent[MOST_REPLICAS];
    int64_t slack[MOST_REPLICAS];
    int slack_row[MOST_REPLICAS];
    int64_t limit = 0;
    for (int column = 0; column < count; column++) owner[column] = -1;
    for (int row = 0; row < count; row++) {
        uint64_t reached = 0;
        int at = row, end = -1;
        for (int column = 0; column < count; column++) slack[column] = INT64_MAX;
        while (end < 0) {
            const int64_t *weights = state->pair_pp + left[at] * state->peers;
            int best = -1;
            for (int column = 0; column < count; column++) {
                if (reached >> column & 1) continue;
                const int64_t weight = weights[right[column]];
                if (weight < slack[column]) {
                    slack[column] = weight;
                    slack_row[column] = at;
                }
                if (best < 0 || slack[column] < slack[best]) best = column;
            }
            if (slack[best] > limit) {
                limit = slack[best];
                if (limit > most) return limit;
            }
            reached |= 1ULL << best;
            parent[best] = slack_row[best];
            if (owner[best] < 0) end = best;
            else at = owner[best];
        }
        while (end >= 0) {
            const int from = parent[end];
            int previous = -1;
            for (int column = 0; column < count; column++)
                if (owner[column] == from) previous = column;
            owner[end] = from;
            end = from == row ? -1 : previous;
        }
    }
    return limit;
}

static int64_t edge_between(const State *state, int a, int b, int64_t most) {
    return bottleneck(state, state->member + a * state->replicas,
                      state->member + b * state->replicas, most);
}

static void fill_stage(State *state, int stage) {
    const int64_t *members = state->member + stage * state->replicas;
    int64_t largest = 0;
    for (int i = 0; i < state->replicas; i++) {
        int64_t sum = 0;
        for (int j = 0; j < state->replicas; j++)
            sum += state->pair_dp[members[i] * state->peers + members[j]];
        state->row[members[i]] = sum;
        if (sum > largest) largest = sum;
    }
    state->group[stage] = largest;
}

static int64_t total(const State *state) {
    int64_t largest = 0, path = 0;
    for (int stage = 0; stage < state->stages; stage++)
        if (state->group[stage] > largest) largest = state->group[stage];
    for (int stage = 0; stage + 1 < state->stages; stage++) path += state->edge[stage];
    return largest + 2 * path;
}

/* Row sums of `stage` with the member in `slot` replaced; the largest is returned. */
static int64_t replaced(const State *state, int stage, int slot, int64_t newcomer,
                        int64_t *rows) {
    const int64_t *members = state->member + stage * state->replicas;
    const int64_t *gone = state->pair_dp + members[slot] * state->peers;
    const int64_t *come = state->pair_dp + newcomer * state->peers;
    int64_t own = 0, largest = 0;
    for (int i = 0; i < state->replicas; i++) {
        if (i == slot) continue;
        const int64_t sum = state->row[members[i]] - gone[members[i]] + come[members[i]];
        rows[i] = sum;
        own += come[members[i]];
        if (sum > largest) largest = sum;
    }
    rows[slot] = own;
    return own > largest ? own : largest;
}

/* Shortest pair of `peer` with a member of `stage`. */
static int64_t nearest(const State *state, int64_t peer, int stage) {
    const int64_t *members = state->member + stage * state->replicas;
    const int64_t *weights = state->pair_pp + peer * state->peers;
    int64_t least = weights[members[0]];
    for (int slot = 1; slot < state->replicas; slot++)
        if (weights[members[slot]] < least) least = weights[members[slot]];
    return least;
}

/* Exchange two peers of unlike stages if the total stays within `limit`. */
static int64_t try_swap(State *state, int64_t now, int64_t limit) {
    const int count = state->replicas;
    const int a = below(state, state->stages);
    int b = below(state, state->stages - 1);
    const int i = below(state, count), j = below(state, count);
    if (b >= a) b++;
    const int64_t x = state->member[a * count + i], y = state->member[b * count + j];
    if (state->kind[x] == state->kind[y]) return now;
    const int64_t group_a = replaced(state, a, i, y, state->trial);
    const int64_t group_b = replaced(state, b, j, x, state->trial + count);
    int64_t largest = group_a > group_b ? group_a : group_b;
    for (int stage = 0; stage < state->stages; stage++)
        if (stage != a && stage != b && state->group[stage] > largest)
            largest = state->group[stage];
    const int touched[4] = {a - 1, a, b - 1, b};
    int64_t path = 0, renewed[4] = {0}, least = 0;
    int use[4];
    for (int stage = 0; stage + 1 < state->stages; stage++) path += state->edge[stage];
    for (int k = 0; k < 4; k++) {
        use[k] = touched[k] >= 0 && touched[k] + 1 < state->stages;
        for (int other = 0; other < k; other++)
            if (use[other] && touched[other] == touched[k]) use[k] = 0;
        if (use[k]) path -= state->edge[touched[k]];
    }
    if (largest + 2 * path > limit) return now;
    state->member[a * count + i] = y;
    state->member[b * count + j] = x;
    for (int k = 0; k < 4; k++)  /* no edge is shorter than a newcomer's own best pair */
        if (use[k]) {
            const int low = touched[k];
            if (k < 2) least += nearest(state, y, low == a ? low + 1 : low);
            else least += nearest(state, x, low == b ? low + 1 : low);
        }
    int fits = largest + 2 * (path + least) <= limit;
    for (int k = 0; k < 4 && fits; k++) {
        if (!use[k]) continue;
        renewed[k] = edge_between(state, touched[k], touched[k] + 1,
                                  (limit - largest) / 2 - path);
        path += renewed[k];
        fits = largest + 2 * path <= limit;
    }
    if (!fits) {
        state->member[a * count + i] = x;
        state->member[b * count + j] = y;
        return now;
    }
    for (int slot = 0; slot < count; slot++) {
        state->row[state->member[a * count + slot]] = state->trial[slot];
        state->row[state->member[b * count + slot]] = state->trial[count + slot];
    }
    state->group[a] = group_a;
    state->group[b] = group_b;
    for (int k = 0; k < 4; k++)
        if (use[k]) state->edge[touched[k]] = renewed[k];
    return largest + 2 * path;
}

static void swap_stages(State *state, int a, int b) {
    const int count = state->replicas;
    for (int slot = 0; slot < count; slot++) {
        const int64_t held = state->member[a * count + slot];
        state->member[a * count + slot] = state->member[b * count + slot];
        state->member[b * count + slot] = held;
    }
    const int64_t group = state->group[a];
    state->group[a] = state->group[b];
    state->group[b] = group;
}

static void reverse(State *state, int first, int last) {
    for (int a = first, b = last; a < b; a++, b--) swap_stages(state, a, b);
    for (int a = first, b = last - 1; a < b; a++, b--) {
        const int64_t edge = state->edge[a];
        state->edge[a] = state->edge[b];
        state->edge[b] = edge;
    }
}

/* Reverse a run of stages if the total stays within `limit`. */
static int64_t try_reverse(State *state, int64_t now, int64_t limit) {
    int first = below(state, state->stages), last = below(state, state->stages);
    if (first > last) {
        const int held = first;
        first = last;
        last = held;
    }
    if (first == last) return now;
    int64_t before = -1, after = -1, change = 0;
    if (first > 0) {
        before = edge_between(state, first - 1, last, INT64_MAX);
        change += before - state->edge[first - 1];
    }
    if (last + 1 < state->stages) {
        after = edge_between(state, first, last + 1, INT64_MAX);
        change += after - state->edge[last];
    }
    if (now + 2 * change > limit) return now;
    reverse(state, first, last);
    if (before >= 0) state->edge[first - 1] = before;
    if (after >= 0) state->edge[last] = after;
    return now + 2 * change;
}

static int64_t anneal(State *state, const int64_t *logs, int64_t temperature, int64_t factor,
                      int64_t levels, int64_t moves, int64_t *best_member) {
    const size_t bytes = sizeof(int64_t) * state->peers;
    for (int stage = 0; stage < state->stages; stage++) fill_stage(state, stage);
    for (int stage = 0; stage + 1 < state->stages; stage++)
        state->edge[stage] = edge_between(state, stage, stage + 1, INT64_MAX);
    int64_t now = total(state), best = now;
    memcpy(best_member, state->member, bytes);
    for (int64_t level = 0; level < levels; level++) {
        for (int64_t move = 0; move < moves; move++) {
            const uint64_t drawn = next_u64(state);
            const int64_t limit = now + ((temperature * logs[drawn & 4095]) >> 20);
            now = (drawn >> 12 & 15) ? try_swap(state, now, limit)
                                     : try_reverse(state, now, limit);
            if (now < best) {
                best = now;
                memcpy(best_member, state->member, bytes);
            }
        }
        temperature = (temperature * factor) >> 20;
    }
    return best;
}

static int take(PyObject *item, Py_buffer *view, Py_ssize_t count) {
    if (PyObject_GetBuffer(item, view, PyBUF_C_CONTIGUOUS) < 0) return -1;
    if (view->len == count * (Py_ssize_t)sizeof(int64_t)) return 0;
    PyBuffer_Release(view);
    PyErr_SetString(PyExc_ValueError, "buffer of the wrong size");
    return -1;
}

static PyObject *paper_anneal(PyObject *self, PyObject *args) {
    PyObject *dp, *pp, *kind, *member, *logs, *result = NULL;
    int stages, replicas;
    long long temperature, factor, levels, moves;
    unsigned long long seed;
    if (!PyArg_ParseTuple(args, "OOOOOiiKLLLL", &dp, &pp, &kind, &member, &logs, &stages, &replicas, &seed,
                          &temperature, &factor, &levels, &moves))
        return NULL;
    if (stages < 2 || replicas < 1 || replicas > MOST_REPLICAS || stages > 4096) {
        PyErr_SetString(PyExc_ValueError, "stages or replicas out of range");
        return NULL;
    }
    const int peers = stages * replicas;
    Py_buffer dp_view, pp_view, kind_view, member_view, logs_view;
    if (take(dp, &dp_view, (Py_ssize_t)peers * peers) < 0) return NULL;
    if (take(pp, &pp_view, (Py_ssize_t)peers * peers) < 0) goto free_dp;
    if (take(kind, &kind_view, peers) < 0) goto free_pp;
    if (take(member, &member_view, peers) < 0) goto free_kind;
    if (take(logs, &logs_view, 4096) < 0) goto free_member;
    int64_t *memory = malloc(sizeof(int64_t) * (3 * peers + 2 * stages + 2 * replicas));
    if (memory == NULL) {
        PyErr_NoMemory();
        goto free_logs;
    }
    State state = {stages, replicas, peers, dp_view.buf, pp_view.buf, memory, memory + peers,
                   memory + 3 * peers, memory + 3 * peers + stages,
                   memory + 3 * peers + 2 * stages, kind_view.buf, seed};
    int64_t *best_member = memory + 2 * peers;
    memcpy(state.member, member_view.buf, sizeof(int64_t) * peers);
    int sound = 1;
    for (int index = 0; index < peers; index++)
        sound &= state.member[index] >= 0 && state.member[index] < peers;
    if (sound) {
        int64_t best;
        Py_BEGIN_ALLOW_THREADS
        best = anneal(&state, logs_view.buf, temperature, factor, levels, moves, best_member);
        Py_END_ALLOW_THREADS
        result = Py_BuildValue("Ly#", (long long)best, (const char *)best_member,
                               (Py_ssize_t)(sizeof(int64_t) * peers));
    } else {
        PyErr_SetString(PyExc_ValueError, "member out of range");
    }
    free(memory);
free_logs:
    PyBuffer_Release(&logs_view);
free_member:
    PyBuffer_Release(&member_view);
free_kind:
    PyBuffer_Release(&kind_view);
free_pp:
    PyBuffer_Release(&pp_view);
free_dp:
    PyBuffer_Release(&dp_view);
    return result;
}

static PyMethodDef methods[] = {
    {"paper_anneal", paper_anneal, METH_VARARGS, "See p2p_dtfm.core.paper_anneal."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernel", NULL, -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModule_Create(&module); }
