/* What a process sees of the container around it, as JSON on standard output; exit code 7.
 *
 *   look COUNT PATH... ARGUMENT...
 *
 * The first COUNT paths are looked at: what is there, who owns it, whether it takes writes (a file `.look` is made in a
 * folder). Linked statically, so that it runs in an image that has nothing else. Bytes above 0x7e are written as \u00XX.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

extern char **environ;

static void text(const char *bytes, size_t length) {
    putchar('"');
    for (size_t at = 0; at < length; at++) {
        unsigned char byte = (unsigned char)bytes[at];
        if (byte < 0x20 || byte > 0x7e || byte == '"' || byte == '\\')
            printf("\\u%04x", byte);
        else
            putchar(byte);
    }
    putchar('"');
}

static void word(const char *bytes) { text(bytes, strlen(bytes)); }

static void words(const char *name, char **list) {
    printf("\"%s\": [", name);
    for (int at = 0; list[at]; at++) {
        if (at)
            putchar(',');
        word(list[at]);
    }
    printf("],\n");
}

static void contents(const char *name, int handle) {
    static char bytes[1 << 20];
    size_t length = 0;
    ssize_t got;
    while (length < sizeof bytes && (got = read(handle, bytes + length, sizeof bytes - length)) > 0)
        length += (size_t)got;
    printf("\"%s\": ", name);
    text(bytes, length);
    printf(",\n");
}

static int takes_writes(const char *path, int folder) {
    char made[PATH_MAX];
    snprintf(made, sizeof made, "%s/.look", path);
    int handle = folder ? open(made, O_WRONLY | O_CREAT, 0644) : open(path, O_WRONLY | O_APPEND);
    if (handle < 0)
        return 0;
    close(handle);
    return 1;
}

static void place(const char *path) {
    struct stat found;
    word(path);
    if (stat(path, &found)) {
        printf(": null");
        return;
    }
    int folder = S_ISDIR(found.st_mode);
    printf(": {\"folder\": %s, \"writable\": %s, \"uid\": %u, \"mark\": ", folder ? "true" : "false",
           takes_writes(path, folder) ? "true" : "false", found.st_uid);
    char mark[PATH_MAX], bytes[256];
    snprintf(mark, sizeof mark, "%s/mark", path);
    int handle = open(folder ? mark : path, O_RDONLY);
    ssize_t length = handle < 0 ? -1 : read(handle, bytes, sizeof bytes);
    if (length < 0)
        printf("null");
    else
        text(bytes, (size_t)length);
    if (handle >= 0)
        close(handle);
    putchar('}');
}

static void gpus(void) {
    printf("\"gpus\": [");
    DIR *devices = opendir("/dev");
    int found = 0;
    for (struct dirent *entry; devices && (entry = readdir(devices));)
        if (!strncmp(entry->d_name, "nvidia", 6) && entry->d_name[6] >= '0' && entry->d_name[6] <= '9') {
            if (found++)
                putchar(',');
            word(entry->d_name);
        }
    printf("],\n");
}

int main(int count, char **argv) {
    char line[PATH_MAX] = "";
    int paths = count > 1 ? atoi(argv[1]) : 0;
    if (count < 2 + paths)
        return 2;
    printf("{");
    words("environ", environ);
    words("argv", argv + 2 + paths);
    printf("\"cwd\": ");
    word(getcwd(line, sizeof line) ? line : "");
    gethostname(line, sizeof line);
    printf(",\n\"hostname\": ");
    word(line);
    printf(",\n\"uid\": %u,\n", getuid());
    gpus();
    int table = open("/proc/self/mountinfo", O_RDONLY);
    contents("mountinfo", table);
    contents("stdin", 0);
    printf("\"places\": {");
    for (int at = 0; at < paths; at++) {
        if (at)
            printf(",\n");
        place(argv[2 + at]);
    }
    printf("}}\n");
    return 7;
}
