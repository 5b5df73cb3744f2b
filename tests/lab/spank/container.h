/* What both plugins share: settings travel to launcher.py as RUNNER_LAB_* variables; a "holder" process keeps the
 * container of a step on a node alive as long as its slurmstepd lives (it waits for the end of a pipe); each task gets
 * the launcher as its program, and the launcher enters the holder's namespaces and then runs the task's command.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <slurm/slurm.h>
#include <slurm/spank.h>

#define PYTHON "/usr/bin/python3"
#define PREFIX "RUNNER_LAB_"
#define ENTER PREFIX "ENTER"

extern char **environ;

static char launcher[PATH_MAX];
static char folder[PATH_MAX];
static char *failure;   /* why there is no container; said by the task, which then exits with 1 as under pyxis */
static int last_plugin; /* only the last plugin of plugstack.conf starts the container: it sees all settings */

static int read_arguments(int ac, char **av)
{
	for (int i = 0; i < ac; i++) {
		if (!strncmp(av[i], "launcher=", 9))
			snprintf(launcher, sizeof(launcher), "%s", av[i] + 9);
		else if (!strncmp(av[i], "folder=", 7))
			snprintf(folder, sizeof(folder), "%s", av[i] + 7);
		else if (!strcmp(av[i], "last"))
			last_plugin = 1;
		else {
			slurm_error("lab: unknown plugin argument %s", av[i]);
			return -1;
		}
	}
	return 0;
}

/* True in the commands of the user: srun, and sbatch or salloc. */
static int in_client(void)
{
	return spank_context() == S_CTX_LOCAL || spank_context() == S_CTX_ALLOCATOR;
}

/* Let the launcher judge all settings before anything is submitted; its words go to the user's terminal. */
static int check(void)
{
	int status = 0;
	pid_t child = fork();

	if (child < 0)
		return -1;
	if (!child) {
		execl(PYTHON, PYTHON, "-IS", launcher, "check", (char *)NULL);
		_exit(127);
	}
	while (waitpid(child, &status, 0) < 0 && errno == EINTR)
		;
	return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : -1;
}

/* In the child: become the user for good (slurmstepd has only the effective ids changed) and start the holder. */
static void exec_holder(char **job_environment, int alive, int ready)
{
	gid_t group = getegid();
	uid_t user = geteuid();
	int null;
	char alive_text[16], ready_text[16];
	char *argv[] = { PYTHON, "-IS", launcher, "hold", folder, alive_text, ready_text, NULL };

	if (user != getuid() && (seteuid(0) || setresgid(group, group, group) || setresuid(user, user, user)))
		_exit(126);
	setsid();
	null = open("/dev/null", O_RDWR);
	for (int standard = 0; standard < 3; standard++) /* slurmstepd waits for the end of the step's own output */
		dup2(null, standard);
	if (fork()) /* the holder is nobody's child: slurmstepd must neither wait for it nor kill it */
		_exit(0);
	snprintf(alive_text, sizeof(alive_text), "%d", alive);
	snprintf(ready_text, sizeof(ready_text), "%d", ready);
	environ = job_environment;
	setenv(PREFIX "FOLDER", folder, 1); /* the lab's mark: it ends what carries it */
	execve(PYTHON, argv, environ);
	_exit(127);
}

struct setting {
	const char *variable; /* RUNNER_LAB_... */
	char *value;          /* NULL: not given */
};

/* In srun, sbatch, salloc: show this plugin's settings to the last plugin's check, then forget them, so that no job
 * inherits them; only the caller's folder stays, since relative paths are relative to it. */
static int check_settings(struct setting *settings)
{
	char here[PATH_MAX];
	int code;

	for (struct setting *s = settings; s->variable; s++)
		if (s->value)
			setenv(s->variable, s->value, 1);
	if (!last_plugin)
		return 0;
	if (getcwd(here, sizeof(here)))
		setenv(PREFIX "HERE", here, 1);
	code = check();
	for (char **entry = environ; *entry;) {
		char name[256];
		size_t length = strcspn(*entry, "=");

		snprintf(name, sizeof(name), "%.*s", (int)length, *entry);
		if (strncmp(name, PREFIX, strlen(PREFIX)) || !strcmp(name, PREFIX "HERE"))
			entry++;
		else
			unsetenv(name); /* moves the following entries up */
	}
	return code;
}

/* Start the holder and wait for its answer: "+STATE" (the path of its state file), or the reason why not. */
static int start_holder(spank_t sp)
{
	char **job_environment = NULL;
	char answer[8192];
	size_t length = 0;
	ssize_t got;
	int alive[2], ready[2];
	pid_t child;

	if (spank_get_item(sp, S_JOB_ENV, &job_environment) != ESPANK_SUCCESS || pipe2(alive, O_CLOEXEC) ||
	    pipe2(ready, O_CLOEXEC))
		return -1;
	child = fork();
	if (child < 0)
		return -1;
	if (!child) {
		fcntl(alive[0], F_SETFD, 0);
		fcntl(ready[1], F_SETFD, 0);
		exec_holder(job_environment, alive[0], ready[1]);
	}
	close(alive[0]); /* alive[1] stays open as long as this slurmstepd lives */
	close(ready[1]);
	waitpid(child, NULL, 0);
	while (length < sizeof(answer) - 1 &&
	       ((got = read(ready[0], answer + length, sizeof(answer) - 1 - length)) > 0 || (got < 0 && errno == EINTR)))
		length += got > 0 ? (size_t)got : 0;
	close(ready[0]);
	answer[length] = '\0';
	if (answer[0] == '0') /* no image: no container */
		return 0;
	if (answer[0] == '+')
		return spank_setenv(sp, ENTER, answer + 1, 1) == ESPANK_SUCCESS ? 0 : -1;
	failure = strdup(answer);
	return 0;
}

/* Tell the holder which node this is, and the name of the batch script's private copy: it must be seen inside. */
static int announce_step(spank_t sp)
{
	char text[16];
	uint32_t node = 0;
	char **argv = NULL;
	int argc = 0;
	uint32_t step = 0;

	spank_get_item(sp, S_JOB_NODEID, &node);
	snprintf(text, sizeof(text), "%u", node);
	if (spank_setenv(sp, PREFIX "NODEID", text, 1) != ESPANK_SUCCESS)
		return -1;
	if (spank_get_item(sp, S_JOB_STEPID, &step) != ESPANK_SUCCESS || step != SLURM_BATCH_SCRIPT)
		return 0;
	if (spank_get_item(sp, S_JOB_ARGV, &argc, &argv) != ESPANK_SUCCESS || argc < 1)
		return -1;
	return spank_setenv(sp, PREFIX "SCRIPT", argv[0], 1) == ESPANK_SUCCESS ? 0 : -1;
}

/* In slurmstepd, once per step and node: publish the settings; the last plugin then makes the container. */
static int make_container(spank_t sp, struct setting *settings)
{
	for (struct setting *s = settings; s->variable; s++)
		if (s->value && spank_setenv(sp, s->variable, s->value, 1) != ESPANK_SUCCESS)
			return -1;
	if (!last_plugin)
		return 0;
	return announce_step(sp) || start_holder(sp) ? -1 : 0;
}

/* Write the container's file system to a squashfs file. */
__attribute__((unused)) static int save(char *state, char *target)
{
	int status = 0;
	gid_t group = getegid();
	uid_t user = geteuid();
	pid_t child = fork();

	if (child < 0)
		return -1;
	if (!child) {
		if (user != getuid() && (seteuid(0) || setresgid(group, group, group) || setresuid(user, user, user)))
			_exit(126);
		execl(PYTHON, PYTHON, "-IS", launcher, "save", state, target, (char *)NULL);
		_exit(127);
	}
	while (waitpid(child, &status, 0) < 0 && errno == EINTR)
		;
	if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
		return 0;
	slurm_error("pyxis: failed to save the container to %s", target);
	return -1;
}

/* Put the launcher in the place of the task's program, which it finds in its environment. */
static int enter_task(spank_t sp)
{
	char state[PATH_MAX];
	char **argv = NULL;
	int argc = 0;

	if (failure) {
		for (char *line = strtok(failure, "\n"); line; line = strtok(NULL, "\n"))
			slurm_error("%s", line);
		return -1;
	}
	if (!last_plugin || spank_getenv(sp, ENTER, state, sizeof(state)) != ESPANK_SUCCESS)
		return 0;
	if (spank_get_item(sp, S_JOB_ARGV, &argc, &argv) != ESPANK_SUCCESS || argc < 1)
		return -1;
	if (spank_setenv(sp, PREFIX "PROGRAM", argv[0], 1) != ESPANK_SUCCESS)
		return -1;
	argv[0] = strdup(launcher);
	return 0;
}
