/* What a processor does once for each parameter and step, in one pass over the memory.
 *
 * AdamW is the devices' own source, told in a processor's words; the norm adds in the same order as
 * norm.cu, lane beside lane; and whether numbers are finite is seen while they are copied or added.
 * Each has a twin in PyTorch's operations with the same bits (updates/adam_w.py,
 * updates/exact_sums.py, stage/finite.py), which serves where this is not compiled. It must be
 * compiled without -ffast-math, and with -ffp-contract=off: `processor.py` looks whether it was.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

/* The same loops for wider registers, where the C library can choose among them. */
#if !defined(NO_CLONES) && defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define AS_WIDE_AS_CAN_BE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define AS_WIDE_AS_CAN_BE
#endif

#define KERNEL AS_WIDE_AS_CAN_BE static void
#define EACH_OF(index, count) for (long long index = 0; index < (count); index++)
#include "adam_w.cu"

#define LANES 65536

AS_WIDE_AS_CAN_BE static void add_squares(const float *__restrict__ values, long long count,
                                          double *__restrict__ lanes) {
    for (long long index = 0; index < count; index++) {
        const double value = values[index];
        lanes[index] += value * value;
    }
}

AS_WIDE_AS_CAN_BE static void halve(double *lanes, long long half) {
    for (long long lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
}

/* What is infinite or no number has more bits than any number, whatever its sign. */
static uint32_t magnitude(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits & 0x7FFFFFFFu;
}

AS_WIDE_AS_CAN_BE static uint32_t largest(const float *values, long long count) {
    uint32_t most = 0;
    for (long long index = 0; index < count; index++) {
        const uint32_t bits = magnitude(values[index]);
        most = bits > most ? bits : most;
    }
    return most;
}

AS_WIDE_AS_CAN_BE static uint32_t copied(const float *__restrict__ values, float *__restrict__ target,
                                         long long count) {
    uint32_t most = 0;
    for (long long index = 0; index < count; index++) {
        const uint32_t bits = magnitude(values[index]);
        most = bits > most ? bits : most;
        target[index] = values[index];
    }
    return most;
}

/* The sum may take the place of either. */
AS_WIDE_AS_CAN_BE static uint32_t added(const float *first, const float *second, float *total,
                                        long long count) {
    uint32_t most = 0;
#pragma GCC ivdep
    for (long long index = 0; index < count; index++) {
        const float sum = first[index] + second[index];
        const uint32_t bits = magnitude(sum);
        most = bits > most ? bits : most;
        total[index] = sum;
    }
    return most;
}

/* The elements, or -1 with an exception set. */
static Py_ssize_t elements_of(PyObject *given, Py_buffer *buffer, int flags) {
    if (PyObject_GetBuffer(given, buffer, flags | PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) return -1;
    if (buffer->itemsize == sizeof(float) && strcmp(buffer->format, "f") == 0)
        return buffer->len / buffer->itemsize;
    PyBuffer_Release(buffer);
    PyErr_SetString(PyExc_TypeError, "not fp32");
    return -1;
}

typedef struct {
    Py_buffer views[4];
    int held;
    Py_ssize_t count;
} Arrays;

static void release(Arrays *arrays) {
    while (arrays->held > 0) PyBuffer_Release(&arrays->views[--arrays->held]);
}

/* All of one length; `changed` has a bit for each that is written. Returns 0 with an exception set
 * where they cannot be. */
static int hold(Arrays *arrays, PyObject *const *given, int many, unsigned changed) {
    for (arrays->held = 0; arrays->held < many;) {
        const int flags = changed >> arrays->held & 1 ? PyBUF_WRITABLE : PyBUF_SIMPLE;
        const Py_ssize_t count = elements_of(given[arrays->held], &arrays->views[arrays->held], flags);
        if (count < 0) break;
        if (arrays->held++ == 0) arrays->count = count;
        if (count != arrays->count) {
            PyErr_SetString(PyExc_ValueError, "of unlike lengths");
            break;
        }
    }
    if (arrays->held == many && !PyErr_Occurred()) return 1;
    release(arrays);
    return 0;
}

/* Parameters, gradient, first and second moments; a part of them; what is the same for all. */
static PyObject *adam_w(PyObject *self, PyObject *args) {
    PyObject *given[4];
    Py_ssize_t start, end;
    float beta1, rest1, beta2, rest2, scale2, epsilon, decay, step_size;
    Arrays arrays;
    if (!PyArg_ParseTuple(args, "OOOOnnffffffff", &given[0], &given[1], &given[2], &given[3],
                          &start, &end, &beta1, &rest1, &beta2, &rest2, &scale2, &epsilon, &decay,
                          &step_size))
        return NULL;
    if (!hold(&arrays, given, 4, 13)) return NULL;
    if (start < 0 || start > end || end > arrays.count) {
        release(&arrays);
        PyErr_SetString(PyExc_ValueError, "no part of the arrays");
        return NULL;
    }
    float *parts[4];
    for (int number = 0; number < 4; number++)
        parts[number] = (float *)arrays.views[number].buf + start;
    Py_BEGIN_ALLOW_THREADS
    adam_w_step(parts[0], parts[1], parts[2], parts[3], end - start, beta1, rest1, beta2, rest2,
                scale2, epsilon, decay, step_size);
    Py_END_ALLOW_THREADS
    release(&arrays);
    Py_RETURN_NONE;
}

static PyObject *squared_norm(PyObject *self, PyObject *given) {
    Py_buffer buffer;
    const Py_ssize_t count = elements_of(given, &buffer, PyBUF_SIMPLE);
    if (count < 0) return NULL;
    /* what no lane of a few elements has is zero, and a square is changed by none that is added */
    Py_ssize_t width = 1;
    while (width < count && width < LANES) width *= 2;
    double *lanes = PyMem_RawCalloc(width, sizeof(double));
    if (lanes == NULL) {
        PyBuffer_Release(&buffer);
        return PyErr_NoMemory();
    }
    const float *values = buffer.buf;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t start = 0; start < count; start += width)
        add_squares(values + start, count - start < width ? count - start : width, lanes);
    for (Py_ssize_t half = width / 2; half > 0; half /= 2) halve(lanes, half);
    Py_END_ALLOW_THREADS
    const double found = lanes[0];
    PyMem_RawFree(lanes);
    PyBuffer_Release(&buffer);
    return PyFloat_FromDouble(found);
}

static PyObject *is_within(PyObject *self, PyObject *args) {
    PyObject *given;
    float limit;
    Arrays arrays;
    if (!PyArg_ParseTuple(args, "Of", &given, &limit)) return NULL;
    if (!hold(&arrays, &given, 1, 0)) return NULL;
    uint32_t most;
    Py_BEGIN_ALLOW_THREADS
    most = largest(arrays.views[0].buf, arrays.count);
    Py_END_ALLOW_THREADS
    release(&arrays);
    return PyBool_FromLong(most <= magnitude(limit));
}

static PyObject *copy(PyObject *self, PyObject *args) {
    PyObject *given[2];
    Arrays arrays;
    if (!PyArg_ParseTuple(args, "OO", &given[0], &given[1])) return NULL;
    if (!hold(&arrays, given, 2, 2)) return NULL;
    uint32_t most;
    Py_BEGIN_ALLOW_THREADS
    most = copied(arrays.views[0].buf, arrays.views[1].buf, arrays.count);
    Py_END_ALLOW_THREADS
    release(&arrays);
    return PyBool_FromLong(most < magnitude(INFINITY));
}

static PyObject *add(PyObject *self, PyObject *args) {
    PyObject *given[3];
    Arrays arrays;
    if (!PyArg_ParseTuple(args, "OOO", &given[0], &given[1], &given[2])) return NULL;
    if (!hold(&arrays, given, 3, 4)) return NULL;
    uint32_t most;
    Py_BEGIN_ALLOW_THREADS
    most = added(arrays.views[0].buf, arrays.views[1].buf, arrays.views[2].buf, arrays.count);
    Py_END_ALLOW_THREADS
    release(&arrays);
    return PyBool_FromLong(most < magnitude(INFINITY));
}

static PyMethodDef methods[] = {
    {"adam_w", adam_w, METH_VARARGS, "See p2p_dtfm.train.kernels.processor."},
    {"add", add, METH_VARARGS, "See p2p_dtfm.train.kernels.processor."},
    {"copy", copy, METH_VARARGS, "See p2p_dtfm.train.kernels.processor."},
    {"is_within", is_within, METH_VARARGS, "See p2p_dtfm.train.kernels.processor."},
    {"squared_norm", squared_norm, METH_O, "See p2p_dtfm.train.kernels.processor."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_processor", NULL, -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__processor(void) { return PyModule_Create(&module); }
