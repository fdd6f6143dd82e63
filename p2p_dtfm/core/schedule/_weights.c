/* How large a part of a segment each holder owns: the search for a plan asks thousands of times.
 *
 * shard_weights.py is the same algorithm in Python, with the reasons; both give equal results for
 * equal arguments (tests/core/test_shard_weights.py compares them). Integers only, no library
 * routine, so that the result is the same with any compiler on any machine.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define MANY 64 /* EXACT_HOLDERS_LIMIT there */
#define UNLIMITED ((int64_t)1 << 50)
#define FILLINGS 3
#define EVEN 256
#define MOST_TRIED (FILLINGS + 1 + 6)

#ifdef __SIZEOF_INT128__
typedef __int128 Wide;

typedef struct {
    int count;
    int64_t rows[MANY][MANY]; /* the pair's rate; UNLIMITED where both are the same */
    int64_t limit[MANY];
    int order[MANY];         /* those with the slowest links first */
    int by_rate[MANY][MANY]; /* others and oneself, the slowest pair first */
} Group;

typedef struct {
    int last; /* how many of the order come last */
    int64_t values[MANY];
} Filling;

static int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t most_of(int64_t a, int64_t b) { return a > b ? a : b; }

/* Insertion: `order` is sorted by `key`, ties by number. */
static void sort(int *order, const int64_t *key, int count) {
    for (int index = 0; index < count; index++) {
        int place = index;
        while (place > 0 && key[order[place - 1]] > key[index]) {
            order[place] = order[place - 1];
            place--;
        }
        order[place] = index;
    }
}

static void prepare(Group *group) {
    int64_t sums[MANY], halves[MANY];
    for (int a = 0; a < group->count; a++) {
        sums[a] = 0;
        for (int b = 0; b < group->count; b++) {
            sums[a] += group->rows[a][b];
            halves[b] = group->rows[a][b] / 2;
        }
        sort(group->by_rate[a], halves, group->count);
    }
    sort(group->order, sums, group->count);
}

/* How far `a` may still grow; `at` moves past those who have stopped. */
static int64_t room(const Group *group, int a, int *at, const char *grows, int64_t beside) {
    const int *others = group->by_rate[a];
    while (*at < group->count - 1 && !grows[others[*at]]) (*at)++;
    const int b = others[*at];
    return grows[b] && b != a ? least_of(group->rows[a][b] / 2, beside) : beside;
}

static void grow(const Group *group, int64_t *values, const char *grown, int64_t *beside) {
    const int count = group->count;
    char grows[MANY];
    int at[MANY] = {0};
    int64_t rooms[MANY];
    int left = 0;
    for (int a = 0; a < count; a++) left += grows[a] = grown[a];
    for (int a = 0; a < count; a++)
        if (grows[a]) rooms[a] = room(group, a, &at[a], grows, beside[a]);
    for (; left > 0; left--) {
        int least = -1;
        for (int a = 0; a < count; a++)
            if (grows[a] && (least < 0 || rooms[a] < rooms[least])) least = a;
        const int64_t value = values[least] = most_of(0, rooms[least]);
        grows[least] = 0;
        for (int a = 0; a < count; a++) {
            if (!grows[a]) continue;
            beside[a] = least_of(beside[a], group->rows[least][a] - value);
            rooms[a] = most_of(value, room(group, a, &at[a], grows, beside[a]));
        }
    }
}

static void fill(const Group *group, const int64_t *own, Filling *filling) {
    const int count = group->count;
    int64_t *values = filling->values, beside[MANY];
    char comes_last[MANY] = {0}, grown[MANY];
    for (int place = 0; place < filling->last; place++) comes_last[group->order[place]] = 1;
    for (int a = 0; a < count; a++) values[a] = 0;
    for (char turn = 0; turn < 2; turn++) {
        for (int a = 0; a < count; a++) grown[a] = comes_last[a] == turn;
        for (int a = 0; a < count; a++) {
            beside[a] = own[a];
            if (!grown[a]) continue;
            for (int b = 0; b < count; b++)
                if (!grown[b]) beside[a] = least_of(beside[a], group->rows[a][b] - values[b]);
        }
        grow(group, values, grown, beside);
    }
    for (int a = 0; a < count; a++) values[a] = most_of(1, values[a]);
}

/* The sum of a rough filling for each of `sizes`. */
static void rough(const Group *group, const int64_t *own, const int *sizes, int many,
                  int64_t *sums) {
    const int count = group->count;
    for (int at = 0; at < many; at++) sums[at] = count;
    for (int place = 0; place < count; place++) {
        const int peer = group->order[place];
        int64_t runs[MANY], rest[MANY], least = UNLIMITED;
        for (int at = 0; at < many; at++) {
            const int end = at + 1 < many ? sizes[at + 1] : count;
            runs[at] = INT64_MAX;
            for (int other = sizes[at]; other < end; other++)
                runs[at] = least_of(runs[at], group->rows[peer][group->order[other]]);
        }
        for (int at = many - 1; at >= 0; at--)
            rest[at] = at + 1 < many ? least_of(runs[at], rest[at + 1]) : runs[at];
        for (int at = 0; at < many && sizes[at] <= place; at++) {
            sums[at] += most_of(1, least_of(own[peer], least_of(least, rest[at] / 2))) - 1;
            least = least_of(least, runs[at]);
        }
    }
}

static Wide rate(const Group *group, const int64_t *values) {
    Wide total = 0, found = -1;
    for (int a = 0; a < group->count; a++) total += values[a];
    for (int a = 0; a < group->count; a++) {
        const Wide own = group->limit[a] * total / (total + (Wide)(group->count - 2) * values[a]);
        if (found < 0 || own < found) found = own;
        for (int b = 0; b < a; b++) {
            const Wide pair = group->rows[a][b] * total / (values[a] + values[b]);
            if (pair < found) found = pair;
        }
    }
    return found;
}

/* The plain filling, then those of the most promising sizes. */
static int first_fillings(const Group *group, const int64_t *own, Filling *tried) {
    int sizes[MANY], chosen[FILLINGS], many = 1, found = 1;
    int64_t sums[MANY];
    for (sizes[0] = 0; sizes[many - 1] < group->count - 1; many++)
        sizes[many] = (int)least_of(group->count - 1, sizes[many - 1] + 1 + sizes[many - 1] / 3);
    rough(group, own, sizes, many, sums);
    tried[0].last = 0;
    for (int pick = 0; pick < FILLINGS && pick < many; pick++) {
        int best = -1;
        for (int at = 0; at < many; at++) {
            int taken = 0;
            for (int before = 0; before < pick; before++) taken |= chosen[before] == at;
            if (!taken && (best < 0 || sums[at] > sums[best])) best = at;
        }
        chosen[pick] = best;
        if (sizes[best]) tried[found++].last = sizes[best];
    }
    for (int number = 0; number < found; number++) fill(group, own, &tried[number]);
    return found;
}

static const Filling *best_filling(const Group *group, Filling *tried) {
    const int count = group->count;
    int64_t own[MANY], lowest = INT64_MAX, sum = 0;
    Wide rates[MOST_TRIED], most = 0;
    for (int a = 0; a < count; a++) {
        own[a] = most_of(1, group->limit[a] / (2 * (count - 1)));
        lowest = least_of(lowest, group->limit[a]);
        sum += group->limit[a];
    }
    int found = first_fillings(group, own, tried), best = 0;
    for (int number = 0; number < found; number++) {
        rates[number] = rate(group, tried[number].values);
        if (rates[number] > rates[best]) best = number;
    }
    if (count > 2 && lowest < UNLIMITED) {
        const int64_t highest = least_of(lowest, sum / (2 * count - 2));
        const int lasts[2] = {0, tried[best].last}, percents[3] = {100, 85, 70};
        for (int which = 0; which < (lasts[1] ? 2 : 1); which++)
            for (int part = 0; part < 3; part++, found++) {
                const int64_t wanted = highest * percents[part] / 100;
                for (int a = 0; a < count; a++)
                    own[a] = most_of(1, (group->limit[a] - wanted) / (count - 2));
                tried[found].last = lasts[which];
                fill(group, own, &tried[found]);
                rates[found] = rate(group, tried[found].values);
            }
    }
    for (int number = 0; number < found; number++)
        if (rates[number] > most) most = rates[number];
    for (int number = 0; number < found; number++)
        if (rates[number] >= most - most / EVEN) return &tried[number];
    return tried;
}

/* 1: taken; 0: not of this size or out of range, so the twin serves; -1: an error is set. */
static int take(Group *group, PyObject *pair, PyObject *limit) {
    PyObject *limits = PySequence_Fast(limit, "limits are a sequence");
    PyObject *rows = limits ? PySequence_Fast(pair, "rows are a sequence") : NULL;
    int fits = rows == NULL ? -1 : 1;
    if (fits > 0) {
        const Py_ssize_t count = PySequence_Fast_GET_SIZE(limits);
        fits = count >= 2 && count <= MANY && PySequence_Fast_GET_SIZE(rows) == count;
        group->count = (int)count;
    }
    for (int a = 0; fits > 0 && a < group->count; a++) {
        PyObject *row = PySequence_Fast(PySequence_Fast_GET_ITEM(rows, a), "a row is a sequence");
        group->limit[a] = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(limits, a));
        if (row == NULL) fits = -1;
        else if (PySequence_Fast_GET_SIZE(row) != group->count) fits = 0;
        for (int b = 0; fits > 0 && b < group->count; b++) {
            group->rows[a][b] =
                a == b ? UNLIMITED : PyLong_AsLongLong(PySequence_Fast_GET_ITEM(row, b));
            if (group->rows[a][b] < 1 || group->rows[a][b] > UNLIMITED) fits = 0;
        }
        if (group->limit[a] < 1 || group->limit[a] > UNLIMITED) fits = 0;
        Py_XDECREF(row);
        if (PyErr_Occurred()) fits = -1;
        if (fits < 0 && PyErr_ExceptionMatches(PyExc_OverflowError)) {
            PyErr_Clear();
            fits = 0;
        }
    }
    Py_XDECREF(rows);
    Py_XDECREF(limits);
    return fits;
}

/* The plain filling alone. */
static const Filling *plain_filling(const Group *group, Filling *filling) {
    int64_t own[MANY];
    for (int a = 0; a < group->count; a++)
        own[a] = most_of(1, group->limit[a] / (2 * (group->count - 1)));
    filling->last = 0;
    fill(group, own, filling);
    return filling;
}

static PyObject *weights_by(const Filling *(*rule)(const Group *, Filling *), PyObject *args) {
    PyObject *pair, *limit;
    Group group;
    Filling tried[MOST_TRIED];
    if (!PyArg_ParseTuple(args, "OO", &pair, &limit)) return NULL;
    const int fits = take(&group, pair, limit);
    if (fits < 0) return NULL;
    if (fits == 0) Py_RETURN_NONE;
    prepare(&group);
    const Filling *found = rule(&group, tried);
    PyObject *weights = PyTuple_New(group.count);
    for (int a = 0; weights != NULL && a < group.count; a++) {
        PyObject *weight = PyLong_FromLongLong(found->values[a]);
        if (weight == NULL) Py_CLEAR(weights);
        else PyTuple_SET_ITEM(weights, a, weight);
    }
    return weights;
}

static PyObject *fair_weights(PyObject *self, PyObject *args) {
    return weights_by(plain_filling, args);
}

static PyObject *shard_weights(PyObject *self, PyObject *args) {
    return weights_by(best_filling, args);
}
#else
static PyObject *fair_weights(PyObject *self, PyObject *args) { Py_RETURN_NONE; }
static PyObject *shard_weights(PyObject *self, PyObject *args) { Py_RETURN_NONE; }
#endif

static PyMethodDef methods[] = {
    {"fair_weights", fair_weights, METH_VARARGS, "See p2p_dtfm.core.schedule.shard_weights."},
    {"shard_weights", shard_weights, METH_VARARGS, "See p2p_dtfm.core.schedule.shard_weights."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_weights", NULL, -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__weights(void) { return PyModule_Create(&module); }
