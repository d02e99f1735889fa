/* For LD_PRELOAD: trace the calls of the C library that change files, and let some of them fail.

   set_fault(call, pattern, error, first, times) lets calls on paths that match a glob pattern fail,
   from the `first` one (1) on, `times` times (0: all of them). trace_calls(fd) writes a line per call
   and starts both. Python, torch, numpy and SQLite all come through here. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char fault[16], pattern[1024];
static int fault_error, fault_first, fault_times, trace = -1;
static atomic_int seen;

void set_fault(const char *call, const char *glob, int error, int first, int times) {
  snprintf(fault, sizeof fault, "%s", call);
  snprintf(pattern, sizeof pattern, "%s", glob);
  fault_error = error, fault_first = first, fault_times = times, seen = 0;
}

void trace_calls(int fd) { trace = fd; }

static int fails(const char *call, const char *path) {
  int before = errno, failed = 0;
  char line[4200];
  if (!strncmp(path, "/proc/", 6) || !strncmp(path, "/dev/", 5)) return 0;
  if (!strcmp(call, fault) && !fnmatch(pattern, path, 0)) {
    int number = atomic_fetch_add(&seen, 1) + 1;
    failed = number >= fault_first && (!fault_times || number < fault_first + fault_times);
  }
  int length = snprintf(line, sizeof line, "%s %s %s\n", failed ? "fail" : "pass", call, path);
  syscall(SYS_write, trace, line, length);
  errno = failed ? fault_error : before;
  return failed;
}

static int find_name(const char *link, char *name) {
  int before = errno;
  ssize_t length = readlink(link, name, 2000);
  errno = before;
  name[length < 0 ? 0 : length] = 0;
  return length > 0 && name[0] == '/';
}

static int at_fails(const char *call, int folder, const char *path) {
  char full[4096] = "", link[64] = "/proc/self/cwd";
  if (trace < 0 || !path) return 0;
  if (path[0] != '/') {
    if (folder != AT_FDCWD) snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    find_name(link, full);
    strcat(full, "/");
  }
  strncat(full, path, 2000);
  return fails(call, full);
}

static int path_fails(const char *call, const char *path) {
  return at_fails(call, AT_FDCWD, path);
}

static int fd_fails(const char *call, int fd) {
  char name[4096], link[64];
  if (trace < 0 || fd <= 2 || fd == trace) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  return find_name(link, name) && fails(call, name); /* no pipes and sockets */
}

/* The next definition of a function, which is the C library's. */
#define NEXT(name) \
  static typeof(&name) next; \
  if (!next) next = (typeof(&name))dlsym(RTLD_NEXT, #name)

/* Define a function whose calls fail with -1 if `condition` holds. */
#define WRAP(type, name, condition, parameters, arguments) \
  type name parameters { \
    NEXT(name); \
    return condition ? -1 : next arguments; \
  }

/* Opening a file for reading is the call `open`, for writing `create`. */
#define WRAP_OPEN(name, folder, parameters, ...) \
  int name parameters { \
    NEXT(name); \
    va_list rest; \
    va_start(rest, flags); \
    int mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, int) : 0; \
    va_end(rest); \
    const char *call = flags & (O_WRONLY | O_RDWR) ? "create" : "open"; \
    return at_fails(call, folder, path) ? -1 : next(__VA_ARGS__, mode); \
  }

#define WRAP_FOPEN(name) \
  FILE *name(const char *path, const char *mode) { \
    NEXT(name); \
    return path_fails(strpbrk(mode, "wa+") ? "create" : "open", path) ? NULL : next(path, mode); \
  }

WRAP_OPEN(open, AT_FDCWD, (const char *path, int flags, ...), path, flags)
WRAP_OPEN(open64, AT_FDCWD, (const char *path, int flags, ...), path, flags)
WRAP_OPEN(openat, folder, (int folder, const char *path, int flags, ...), folder, path, flags)
WRAP_OPEN(openat64, folder, (int folder, const char *path, int flags, ...), folder, path, flags)
WRAP_FOPEN(fopen)
WRAP_FOPEN(fopen64)

WRAP(ssize_t, read, fd_fails("read", fd), (int fd, void *data, size_t n), (fd, data, n))
WRAP(ssize_t, write, fd_fails("write", fd), (int fd, const void *data, size_t n), (fd, data, n))
WRAP(ssize_t, pwrite, fd_fails("write", fd), (int fd, const void *data, size_t n, off_t at),
     (fd, data, n, at))
WRAP(ssize_t, pwrite64, fd_fails("write", fd), (int fd, const void *data, size_t n, off64_t at),
     (fd, data, n, at))
WRAP(ssize_t, writev, fd_fails("write", fd), (int fd, const struct iovec *data, int n),
     (fd, data, n))
WRAP(int, close, fd_fails("close", fd) && !syscall(SYS_close, fd), (int fd), (fd))
WRAP(int, fsync, fd_fails("fsync", fd), (int fd), (fd))
WRAP(int, fdatasync, fd_fails("fsync", fd), (int fd), (fd))
WRAP(int, flock, fd_fails("flock", fd), (int fd, int operation), (fd, operation))
WRAP(int, ftruncate, fd_fails("truncate", fd), (int fd, off_t size), (fd, size))
WRAP(int, ftruncate64, fd_fails("truncate", fd), (int fd, off64_t size), (fd, size))
WRAP(int, truncate, path_fails("truncate", path), (const char *path, off_t size), (path, size))
WRAP(int, truncate64, path_fails("truncate", path), (const char *path, off64_t size), (path, size))
WRAP(int, rename, path_fails("rename", to), (const char *from, const char *to), (from, to))
WRAP(int, renameat, at_fails("rename", folder, to),
     (int other, const char *from, int folder, const char *to), (other, from, folder, to))
WRAP(int, link, path_fails("link", to), (const char *from, const char *to), (from, to))
WRAP(int, linkat, at_fails("link", folder, to),
     (int other, const char *from, int folder, const char *to, int flags),
     (other, from, folder, to, flags))
WRAP(int, mkdir, path_fails("mkdir", path), (const char *path, mode_t mode), (path, mode))
WRAP(int, mkdirat, at_fails("mkdir", folder, path), (int folder, const char *path, mode_t mode),
     (folder, path, mode))
WRAP(int, unlink, path_fails("unlink", path), (const char *path), (path))
WRAP(int, unlinkat, at_fails("unlink", folder, path), (int folder, const char *path, int flags),
     (folder, path, flags))
WRAP(int, rmdir, path_fails("unlink", path), (const char *path), (path))
WRAP(int, chmod, path_fails("chmod", path), (const char *path, mode_t mode), (path, mode))
WRAP(int, fchmodat, at_fails("chmod", folder, path),
     (int folder, const char *path, mode_t mode, int flags), (folder, path, mode, flags))
WRAP(int, utimensat, at_fails("utime", folder, path),
     (int folder, const char *path, const struct timespec times[2], int flags),
     (folder, path, times, flags))
