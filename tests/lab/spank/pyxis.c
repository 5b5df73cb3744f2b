/* pyxis' --container-* options on srun, sbatch and salloc. The names and what is refused: pyxis 0.24, args.c. */
#include "container.h"

SPANK_PLUGIN(pyxis, 1)

enum { IMAGE, MOUNTS, WORKDIR, NAME, SAVE, ENV, UNSHARE, LOG, HOME, REMAP, ENTRYPOINT, WRITABLE, COUNT };

static struct setting settings[COUNT + 1] = {
	{ PREFIX "PYXIS_IMAGE", NULL },	     { PREFIX "PYXIS_MOUNTS", NULL },	  { PREFIX "PYXIS_WORKDIR", NULL },
	{ PREFIX "PYXIS_NAME", NULL },	     { PREFIX "PYXIS_SAVE", NULL },	  { PREFIX "PYXIS_ENV", NULL },
	{ PREFIX "PYXIS_UNSHARE", NULL },    { PREFIX "PYXIS_ENTRYPOINT_LOG", NULL }, { PREFIX "PYXIS_MOUNT_HOME", NULL },
	{ PREFIX "PYXIS_REMAP_ROOT", NULL }, { PREFIX "PYXIS_ENTRYPOINT", NULL }, { PREFIX "PYXIS_WRITABLE", NULL },
	{ NULL, NULL },
};

#define OFF 100 /* val of the option that turns the same setting off */
static int take(int val, const char *argument, int remote);

static struct spank_option options[] = {
	{ "container-image", "[USER@][REGISTRY#]IMAGE[:TAG]|PATH", "[lab] image or squashfs file", 1, IMAGE, take },
	{ "container-mounts", "SRC:DST[:FLAGS][,SRC:DST...]", "[lab] bind mounts", 1, MOUNTS, take },
	{ "container-workdir", "PATH", "[lab] working directory inside", 1, WORKDIR, take },
	{ "container-name", "NAME[:auto|create|exec|no_exec]", "[lab] container that outlives the step", 1, NAME, take },
	{ "container-save", "PATH", "[lab] save the container as squashfs file", 1, SAVE, take },
	{ "container-env", "NAME[,NAME...]", "[lab] variables whose host value beats the image's", 1, ENV, take },
	{ "container-unshare", "net,ipc,uts", "[lab] not available in the lab", 1, UNSHARE, take },
	{ "container-entrypoint-log", NULL, "[lab] print the entrypoint's output", 0, LOG, take },
	{ "container-mount-home", NULL, "[lab] mount the home directory", 0, HOME, take },
	{ "no-container-mount-home", NULL, "[lab] do not mount the home directory", 0, HOME + OFF, take },
	{ "container-remap-root", NULL, "[lab] be root inside", 0, REMAP, take },
	{ "no-container-remap-root", NULL, "[lab] keep the user inside", 0, REMAP + OFF, take },
	{ "container-entrypoint", NULL, "[lab] run the image's entrypoint", 0, ENTRYPOINT, take },
	{ "no-container-entrypoint", NULL, "[lab] do not run the image's entrypoint", 0, ENTRYPOINT + OFF, take },
	{ "container-writable", NULL, "[lab] writable root file system", 0, WRITABLE, take },
	{ "container-readonly", NULL, "[lab] read-only root file system", 0, WRITABLE + OFF, take },
	SPANK_OPTIONS_TABLE_END
};

static int take(int val, const char *argument, int remote)
{
	int which = val % OFF;
	const char *value = which >= LOG ? (val >= OFF ? "0" : "1") : argument;
	const char *name = "";

	(void)remote;
	for (struct spank_option *o = options; o->name; o++)
		if (o->val == val)
			name = o->name;
	if (!value || !*value) {
		slurm_error("pyxis: --%s: argument required", name);
		return -1;
	}
	/* Slurm may call twice with the same value: only another value is an error. */
	if (settings[which].value && strcmp(settings[which].value, value)) {
		slurm_error(which >= LOG ? "pyxis: both --%s and its opposite were specified" :
					   "pyxis: --%s specified multiple times", name);
		return -1;
	}
	free(settings[which].value);
	settings[which].value = strdup(value);
	return 0;
}

/* PYXIS_CONTAINER_IMAGE and PYXIS_CONTAINER_NAME alone are enough to ask for a container. */
static int is_asked(spank_t sp)
{
	char text[PATH_MAX];

	for (struct setting *s = settings; s->variable; s++)
		if (s->value)
			return 1;
	if (in_client())
		return getenv("PYXIS_CONTAINER_IMAGE") || getenv("PYXIS_CONTAINER_NAME") || getenv(PREFIX "EDF");
	return spank_getenv(sp, "PYXIS_CONTAINER_IMAGE", text, sizeof(text)) == ESPANK_SUCCESS ||
	       spank_getenv(sp, "PYXIS_CONTAINER_NAME", text, sizeof(text)) == ESPANK_SUCCESS ||
	       spank_getenv(sp, PREFIX "EDF", text, sizeof(text)) == ESPANK_SUCCESS;
}

int slurm_spank_init(spank_t sp, int ac, char **av)
{
	if (read_arguments(ac, av))
		return -1;
	for (struct spank_option *o = options; o->name; o++)
		if (spank_option_register(sp, o) != ESPANK_SUCCESS)
			return -1;
	return 0;
}

int slurm_spank_init_post_opt(spank_t sp, int ac, char **av)
{
	(void)ac;
	(void)av;
	return in_client() && is_asked(sp) ? check_settings(settings) : 0;
}

int slurm_spank_user_init(spank_t sp, int ac, char **av)
{
	(void)ac;
	(void)av;
	return is_asked(sp) ? make_container(sp, settings) : 0;
}

int slurm_spank_task_init(spank_t sp, int ac, char **av)
{
	(void)ac;
	(void)av;
	return enter_task(sp);
}

/* The last task of the node has ended: --container-save is done now, before the step ends. */
int slurm_spank_task_exit(spank_t sp, int ac, char **av)
{
	static uint32_t ended;
	char state[PATH_MAX], target[PATH_MAX];
	uint32_t tasks = 0;

	(void)ac;
	(void)av;
	if (settings[SAVE].value)
		snprintf(target, sizeof(target), "%s", settings[SAVE].value);
	else if (spank_getenv(sp, "PYXIS_CONTAINER_SAVE", target, sizeof(target)) != ESPANK_SUCCESS)
		return 0;
	if (spank_get_item(sp, S_JOB_LOCAL_TASK_COUNT, &tasks) != ESPANK_SUCCESS || ++ended < tasks)
		return 0;
	return spank_getenv(sp, ENTER, state, sizeof(state)) == ESPANK_SUCCESS ? save(state, target) : 0;
}
