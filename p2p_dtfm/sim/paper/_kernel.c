/* The inner loop of the paper-cost solver: simulated annealing in 64-bit integers.
 *
 * paper_anneal.py makes the same moves and decisions in Python, but matches each edge from scratch
 * where this mends the matching that it had; both must give equal results for equal arguments
 * (tests/sim/test_paper_solver.py compares them). Integers only, no library routine beyond memory,
 * so that the result is the same with any compiler on any machine.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MOST_REPLICAS 64
#define FREE (-1)

typedef struct {
    int stages, replicas, peers;
    const int64_t *pair_dp;
    const int32_t *pair_pp;  /* ranks: indices into `length` */
    const int64_t *length;   /* of a rank, ns; ascending */
    const int64_t *kind;     /* kind[peer]: peers of one kind are interchangeable */
    int64_t *member;         /* member[stage * replicas + slot] is a peer */
    int64_t *row;            /* row[stage * replicas + slot]: its data-parallel sum */
    int64_t *group;          /* group[stage]: largest row of the stage */
    int64_t *trial;          /* row sums of the two stages that a swap touches */
    int32_t *pair;           /* pair[stage][left slot][right slot]: rank between stage, stage + 1 */
    int32_t *mate;           /* mate[stage][left slot]: right slot in the matching */
    int32_t *edge;           /* edge[stage]: rank of the bottleneck of that matching */
    int64_t path;            /* sum of all edges, ns */
    uint64_t random;
} State;

/* A change of one row and/or one column of an edge, and what it was before. */
typedef struct {
    int stage, row, column;  /* FREE: no row, no column */
    int32_t edge, least;
    int32_t old_row[MOST_REPLICAS], old_column[MOST_REPLICAS], mate[MOST_REPLICAS];
} Change;

static uint64_t next_u64(State *state) {
    uint64_t mixed = (state->random += 0x9E3779B97F4A7C15ULL);
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ULL;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBULL;
    return mixed ^ (mixed >> 31);
}

static int below(State *state, uint64_t bound) {
    return (int)(((next_u64(state) >> 32) * bound) >> 32);
}

/* Match one more row in the least way: an alternating tree grows over pairs within `limit`; when it
 * can grow no more, the limit rises to the smallest pair that leaves the tree, which is unavoidable
 * (Gabow and Tarjan 1988 name the problem). Returns the limit then.
 */
static int32_t augment(const int32_t *pair, int count, int row, int32_t *mate, int32_t *owner,
                       int32_t limit) {
    int32_t slack[MOST_REPLICAS], parent[MOST_REPLICAS];
    uint64_t reached = 0;
    int at = row, end = FREE;
    for (int column = 0; column < count; column++) slack[column] = INT32_MAX;
    while (end < 0) {
        const int32_t *weights = pair + at * count;
        int best = FREE;
        for (int column = 0; column < count; column++) {
            if (reached >> column & 1) continue;
            if (weights[column] < slack[column]) {
                slack[column] = weights[column];
                parent[column] = at;
            }
            if (best < 0 || slack[column] < slack[best]) best = column;
        }
        if (slack[best] > limit) limit = slack[best];
        reached |= 1ULL << best;
        if (owner[best] < 0) end = best;
        else at = owner[best];
    }
    for (int column = end;;) {
        const int from = parent[column], freed = mate[from];
        owner[column] = from;
        mate[from] = column;
        if (from == row) return limit;
        column = freed;
    }
}

/* Match one more row with pairs within `limit`, by breadth-first search; 0 if that is impossible. */
static int extend(const int32_t *pair, int count, int row, int32_t *mate, int32_t *owner,
                  int32_t limit) {
    int32_t parent[MOST_REPLICAS], queue[MOST_REPLICAS];
    uint64_t left = count < 64 ? (1ULL << count) - 1 : ~0ULL;
    int queued = 1;
    queue[0] = row;
    for (int next = 0; next < queued; next++) {
        const int at = queue[next];
        const int32_t *weights = pair + at * count;
        uint64_t near = 0;
        for (int column = 0; column < count; column++)
            near |= (uint64_t)(weights[column] <= limit) << column;
        near &= left;
        left ^= near;
        for (; near; near &= near - 1) {
            int column = __builtin_ctzll(near);
            parent[column] = at;
            if (owner[column] >= 0) {
                queue[queued++] = owner[column];
                continue;
            }
            for (;;) {
                const int from = parent[column], freed = mate[from];
                owner[column] = from;
                mate[from] = column;
                if (from == row) return 1;
                column = freed;
            }
        }
    }
    return 0;
}

/* Whether a pair is the best that its row or its column has: no matching does without its like. */
static int needed(const int32_t *pair, int count, int row, int column) {
    const int32_t weight = pair[row * count + column];
    int32_t along = weight, across = weight;
    for (int other = 0; other < count; other++) {
        if (pair[row * count + other] < along) along = pair[row * count + other];
        if (pair[other * count + column] < across) across = pair[other * count + column];
    }
    return along == weight || across == weight;
}

/* Completes a matching so that its largest pair is smallest; returns that pair's rank. Rows without
 * a mate have FREE there. If the pair must be longer than `most_ns`, it may give up at a rank that
 * is too long already.
 *
 * Each row without a mate is matched in the least way. If the largest pair is then one that was
 * there before, it may be needless: it is taken out and its row matched anew, for as long as that
 * helps.
 */
static int32_t complete(const State *state, const int32_t *pair, int32_t *mate, int64_t most_ns) {
    const int count = state->replicas;
    int32_t owner[MOST_REPLICAS], kept[MOST_REPLICAS], known = 0;
    for (int column = 0; column < count; column++) owner[column] = FREE;
    for (int row = 0; row < count; row++)
        if (mate[row] >= 0) {
            const int32_t weight = pair[row * count + mate[row]];
            owner[mate[row]] = row;
            if (weight > known) known = weight;
        }
    int32_t limit = known;
    for (int row = 0; row < count; row++)
        if (mate[row] < 0 && !extend(pair, count, row, mate, owner, limit)) {
            limit = augment(pair, count, row, mate, owner, limit);
            if (state->length[limit] > most_ns) return limit;
        }
    while (limit == known) {
        memcpy(kept, mate, sizeof(int32_t) * count);
        known = 0;
        for (int row = 0; row < count; row++) {
            const int32_t weight = pair[row * count + mate[row]];
            if (weight < limit) {
                if (weight > known) known = weight;
                continue;
            }
            if (needed(pair, count, row, mate[row])) goto exact;
            owner[mate[row]] = FREE;
            mate[row] = FREE;
        }
        for (int row = 0; row < count; row++)
            if (mate[row] < 0 && !extend(pair, count, row, mate, owner, limit - 1)) goto exact;
        for (int row = 0; row < count; row++)
            if (pair[row * count + mate[row]] > known) known = pair[row * count + mate[row]];
        limit = known;
    }
    return limit;
exact:
    memcpy(mate, kept, sizeof(int32_t) * count);
    return limit;
}

static int32_t *pairs_of(const State *state, int stage) {
    return state->pair + stage * state->replicas * state->replicas;
}

/* Ranks between all members of two stages, row after row. */
static void fill_pairs(const State *state, int a, int b, int32_t *pair) {
    const int count = state->replicas;
    for (int i = 0; i < count; i++) {
        const int32_t *ranks = state->pair_pp + state->member[a * count + i] * state->peers;
        for (int j = 0; j < count; j++) pair[i * count + j] = ranks[state->member[b * count + j]];
    }
}

static void fill_stage(State *state, int stage) {
    const int count = state->replicas;
    const int64_t *members = state->member + stage * count;
    int64_t largest = 0;
    for (int i = 0; i < count; i++) {
        int64_t sum = 0;
        for (int j = 0; j < count; j++)
            sum += state->pair_dp[members[i] * state->peers + members[j]];
        state->row[stage * count + i] = sum;
        if (sum > largest) largest = sum;
    }
    state->group[stage] = largest;
}

/* Everything that follows from `member`. */
static void fill(State *state) {
    const int count = state->replicas;
    state->path = 0;
    for (int stage = 0; stage < state->stages; stage++) fill_stage(state, stage);
    for (int stage = 0; stage + 1 < state->stages; stage++) {
        int32_t *mate = state->mate + stage * count;
        for (int slot = 0; slot < count; slot++) mate[slot] = FREE;
        fill_pairs(state, stage, stage + 1, pairs_of(state, stage));
        state->edge[stage] = complete(state, pairs_of(state, stage), mate, INT64_MAX);
        state->path += state->length[state->edge[stage]];
    }
}

static int64_t total(const State *state) {
    int64_t largest = 0;
    for (int stage = 0; stage < state->stages; stage++)
        if (state->group[stage] > largest) largest = state->group[stage];
    return largest + 2 * state->path;
}

static int64_t row_of(const State *state, int stage, int slot, int64_t newcomer) {
    const int count = state->replicas;
    const int64_t *members = state->member + stage * count;
    const int64_t *come = state->pair_dp + newcomer * state->peers;
    int64_t sum = 0;
    for (int i = 0; i < count; i++) sum += come[members[i]];
    return sum - come[members[slot]];
}

/* Row sums of `stage` with the member in `slot` replaced, whose own is `own`; the largest. */
static int64_t replaced(const State *state, int stage, int slot, int64_t newcomer, int64_t own,
                        int64_t *rows) {
    const int count = state->replicas;
    const int64_t *members = state->member + stage * count;
    const int64_t *before = state->row + stage * count;
    const int64_t *gone = state->pair_dp + members[slot] * state->peers;
    const int64_t *come = state->pair_dp + newcomer * state->peers;
    int64_t largest = own;
    for (int i = 0; i < count; i++) {
        const int64_t sum = before[i] - gone[members[i]] + come[members[i]];
        rows[i] = sum;
        if (i != slot && sum > largest) largest = sum;
    }
    rows[slot] = own;
    return largest;
}

/* Put the present members' ranks into one row and/or column of an edge; `least` is a rank that the
 * bottleneck cannot be below: each newcomer's own best pair.
 */
static void change_pairs(const State *state, Change *change) {
    const int count = state->replicas;
    const int64_t *left = state->member + change->stage * count, *right = left + count;
    int32_t *pair = pairs_of(state, change->stage);
    change->least = 0;
    if (change->row >= 0) {
        const int32_t *ranks = state->pair_pp + left[change->row] * state->peers;
        int32_t *row = pair + change->row * count, least = INT32_MAX;
        memcpy(change->old_row, row, sizeof(int32_t) * count);
        for (int j = 0; j < count; j++) {
            row[j] = ranks[right[j]];
            if (row[j] < least) least = row[j];
        }
        change->least = least;
    }
    if (change->column >= 0) {
        const int32_t *ranks = state->pair_pp + right[change->column] * state->peers;
        int32_t *column = pair + change->column, least = INT32_MAX;
        for (int i = 0; i < count; i++) {
            change->old_column[i] = column[i * count];
            column[i * count] = ranks[left[i]];
            if (column[i * count] < least) least = column[i * count];
        }
        if (least > change->least) change->least = least;
    }
}

static void restore_pairs(const State *state, const Change *change) {
    const int count = state->replicas;
    int32_t *pair = pairs_of(state, change->stage);
    if (change->column >= 0)
        for (int i = 0; i < count; i++) pair[change->column + i * count] = change->old_column[i];
    if (change->row >= 0)
        memcpy(pair + change->row * count, change->old_row, sizeof(int32_t) * count);
}

/* The bottleneck of a changed edge into `change->edge`, its matching into `change->mate`. Mates that
 * are still as near as the bottleneck was stay together.
 */
static void match_anew(const State *state, Change *change, int64_t most_ns) {
    const int count = state->replicas;
    const int32_t *pair = pairs_of(state, change->stage), edge = state->edge[change->stage];
    int32_t *mate = change->mate;
    memcpy(mate, state->mate + change->stage * count, sizeof(int32_t) * count);
    if (change->row >= 0 && pair[change->row * count + mate[change->row]] > edge)
        mate[change->row] = FREE;
    for (int row = 0; change->column >= 0 && row < count; row++)
        if (mate[row] == change->column && pair[row * count + mate[row]] > edge) mate[row] = FREE;
    change->edge = complete(state, pair, mate, most_ns);
}

/* The edges that a swap of slot i of stage a with slot j of stage b touches; how many. */
static int touched_edges(const State *state, int a, int i, int b, int j, Change *changes) {
    int count = 0;
    const int stages[4] = {a - 1, a, b - 1, b};
    for (int k = 0; k < 4; k++) {
        const int stage = stages[k];
        int known = stage < 0 || stage + 1 >= state->stages;
        for (int other = 0; other < count; other++) known |= changes[other].stage == stage;
        if (known) continue;
        changes[count].stage = stage;
        changes[count].row = stage == a ? i : stage == b ? j : FREE;
        changes[count].column = stage + 1 == a ? i : stage + 1 == b ? j : FREE;
        count++;
    }
    return count;
}

/* Whether the touched edges stay within `room_ns` in all; then they are matched anew. */
static int edges_fit(State *state, Change *changes, int count, int64_t room_ns) {
    int64_t least_ns = 0;
    int changed = 0, fits = 1;
    for (; changed < count && fits; changed++) {
        change_pairs(state, &changes[changed]);
        least_ns += state->length[changes[changed].least];
        fits = least_ns <= room_ns;
    }
    for (int k = 0; k < count && fits; k++) {
        Change *change = &changes[k];
        least_ns -= state->length[change->least];
        const int64_t most_ns = room_ns - least_ns;
        match_anew(state, change, most_ns);
        least_ns += state->length[change->edge];
        fits = state->length[change->edge] <= most_ns;
    }
    if (!fits)
        for (int k = 0; k < changed; k++) restore_pairs(state, &changes[k]);
    return fits;
}

/* Exchange two peers of unlike stages if the total stays within `limit`. */
static int64_t try_swap(State *state, int64_t now, int64_t limit) {
    const int count = state->replicas;
    const int a = below(state, state->stages);
    int b = below(state, state->stages - 1);
    const int i = below(state, count), j = below(state, count);
    if (b >= a) b++;
    int64_t *first = state->member + a * count + i, *second = state->member + b * count + j;
    const int64_t x = *first, y = *second;
    if (state->kind[x] == state->kind[y]) return now;
    Change changes[4];
    const int edges = touched_edges(state, a, i, b, j, changes);
    int64_t path = state->path;
    for (int k = 0; k < edges; k++) path -= state->length[state->edge[changes[k].stage]];
    int64_t largest = 0;
    for (int stage = 0; stage < state->stages; stage++)
        if (stage != a && stage != b && state->group[stage] > largest)
            largest = state->group[stage];
    const int64_t room = limit - 2 * path;
    const int64_t own_a = row_of(state, a, i, y), own_b = row_of(state, b, j, x);
    if (own_a > room || own_b > room) return now;
    const int64_t group_a = replaced(state, a, i, y, own_a, state->trial);
    const int64_t group_b = replaced(state, b, j, x, own_b, state->trial + count);
    if (group_a > largest) largest = group_a;
    if (group_b > largest) largest = group_b;
    if (largest > room) return now;
    *first = y;
    *second = x;
    if (!edges_fit(state, changes, edges, (room - largest) / 2)) {
        *first = x;
        *second = y;
        return now;
    }
    memcpy(state->row + a * count, state->trial, sizeof(int64_t) * count);
    memcpy(state->row + b * count, state->trial + count, sizeof(int64_t) * count);
    state->group[a] = group_a;
    state->group[b] = group_b;
    state->path = path;
    for (int k = 0; k < edges; k++) {
        const int stage = changes[k].stage;
        memcpy(state->mate + stage * count, changes[k].mate, sizeof(int32_t) * count);
        state->edge[stage] = changes[k].edge;
        state->path += state->length[changes[k].edge];
    }
    return largest + 2 * state->path;
}

/* Bottleneck between two stages, ns. */
static int64_t edge_between(const State *state, int a, int b) {
    int32_t *pair = pairs_of(state, state->stages - 1);  /* room for one more edge */
    int32_t mate[MOST_REPLICAS];
    fill_pairs(state, a, b, pair);
    for (int slot = 0; slot < state->replicas; slot++) mate[slot] = FREE;
    return state->length[complete(state, pair, mate, INT64_MAX)];
}

/* Reverse a run of stages if the total stays within `limit`. */
static int64_t try_reverse(State *state, int64_t now, int64_t limit) {
    const int count = state->replicas;
    int first = below(state, state->stages), last = below(state, state->stages);
    if (first > last) {
        const int held = first;
        first = last;
        last = held;
    }
    if (first == last) return now;
    int64_t change = 0;
    if (first > 0)
        change += edge_between(state, first - 1, last) - state->length[state->edge[first - 1]];
    if (last + 1 < state->stages)
        change += edge_between(state, first, last + 1) - state->length[state->edge[last]];
    if (now + 2 * change > limit) return now;
    for (int a = first, b = last; a < b; a++, b--)
        for (int slot = 0; slot < count; slot++) {
            const int64_t held = state->member[a * count + slot];
            state->member[a * count + slot] = state->member[b * count + slot];
            state->member[b * count + slot] = held;
        }
    fill(state);
    return now + 2 * change;
}

static int64_t anneal(State *state, const int64_t *logs, int64_t temperature, int64_t factor,
                      int64_t levels, int64_t moves, int64_t *best_member) {
    const size_t bytes = sizeof(int64_t) * state->peers;
    fill(state);
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

/* The buffer of `item`, `count` values of `size` bytes each; any number of them if count < 0. */
static int take(PyObject *item, Py_buffer *view, Py_ssize_t count, Py_ssize_t size) {
    if (PyObject_GetBuffer(item, view, PyBUF_C_CONTIGUOUS) < 0) return -1;
    if (count < 0 ? view->len > 0 && view->len % size == 0 : view->len == count * size) return 0;
    PyBuffer_Release(view);
    PyErr_SetString(PyExc_ValueError, "buffer of the wrong size");
    return -1;
}

/* Whether every index that the search follows lies within its table. */
static int sound(const State *state, Py_ssize_t lengths) {
    const Py_ssize_t pairs = (Py_ssize_t)state->peers * state->peers;
    for (Py_ssize_t index = 0; index < pairs; index++)
        if (state->pair_pp[index] < 0 || state->pair_pp[index] >= lengths) return 0;
    for (int index = 0; index < state->peers; index++)
        if (state->member[index] < 0 || state->member[index] >= state->peers) return 0;
    return 1;
}

static PyObject *searched(State *state, const int64_t *start, Py_ssize_t lengths,
                          const int64_t *logs, int64_t temperature, int64_t factor,
                          int64_t levels, int64_t moves) {
    const int64_t peers = state->peers, stages = state->stages, replicas = state->replicas;
    int64_t *wide = malloc(sizeof(int64_t) * (3 * peers + stages + 2 * replicas));
    int32_t *narrow = malloc(sizeof(int32_t) * (peers * replicas + peers + stages));
    PyObject *result = NULL;
    if (wide == NULL || narrow == NULL) {
        PyErr_NoMemory();
    } else {
        int64_t *best_member = wide + peers, best = 0;
        state->member = wide;
        state->row = wide + 2 * peers;
        state->group = wide + 3 * peers;
        state->trial = wide + 3 * peers + stages;
        state->pair = narrow;
        state->mate = narrow + peers * replicas;
        state->edge = narrow + peers * replicas + peers;
        memcpy(state->member, start, sizeof(int64_t) * peers);
        if (sound(state, lengths)) {
            Py_BEGIN_ALLOW_THREADS
            best = anneal(state, logs, temperature, factor, levels, moves, best_member);
            Py_END_ALLOW_THREADS
            result = Py_BuildValue("Ly#", (long long)best, (const char *)best_member,
                                   (Py_ssize_t)(sizeof(int64_t) * peers));
        } else {
            PyErr_SetString(PyExc_ValueError, "index out of range");
        }
    }
    free(wide);
    free(narrow);
    return result;
}

static PyObject *paper_anneal(PyObject *self, PyObject *args) {
    PyObject *dp, *ranks, *lengths, *kinds, *start, *logs, *result = NULL;
    int stages, replicas;
    long long temperature, factor, levels, moves;
    unsigned long long seed;
    if (!PyArg_ParseTuple(args, "OOOOOOiiKLLLL", &dp, &ranks, &lengths, &kinds, &start, &logs,
                          &stages, &replicas, &seed, &temperature, &factor, &levels, &moves))
        return NULL;
    if (stages < 2 || replicas < 1 || replicas > MOST_REPLICAS || stages > 4096) {
        PyErr_SetString(PyExc_ValueError, "stages or replicas out of range");
        return NULL;
    }
    const Py_ssize_t peers = (Py_ssize_t)stages * replicas;
    PyObject *const items[6] = {dp, ranks, lengths, kinds, start, logs};
    const Py_ssize_t counts[6] = {peers * peers, peers * peers, -1, peers, peers, 4096};
    Py_buffer views[6];
    int taken = 0;
    while (taken < 6 && take(items[taken], &views[taken], counts[taken],
                             taken == 1 ? sizeof(int32_t) : sizeof(int64_t)) == 0)
        taken++;
    if (taken == 6) {
        State state = {.stages = stages, .replicas = replicas, .peers = (int)peers,
                       .pair_dp = views[0].buf, .pair_pp = views[1].buf, .length = views[2].buf,
                       .kind = views[3].buf, .random = seed};
        const Py_ssize_t known = views[2].len / (Py_ssize_t)sizeof(int64_t);
        result = searched(&state, views[4].buf, known, views[5].buf, temperature, factor,
                          levels, moves);
    }
    while (taken > 0) PyBuffer_Release(&views[--taken]);
    return result;
}

static PyMethodDef methods[] = {
    {"paper_anneal", paper_anneal, METH_VARARGS, "See p2p_dtfm.sim.paper.annealing."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernel", NULL, -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModule_Create(&module); }
