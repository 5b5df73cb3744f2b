/* An option of srun, sbatch and salloc that names an EDF: FLAG is its name, SETTING where the launcher finds its value. */
#include "container.h"

static struct setting settings[] = { { PREFIX SETTING, NULL }, { NULL, NULL } };

static int take(int value, const char *argument, int remote)
{
	(void)value;
	(void)remote;
	if (!argument || !*argument) {
		slurm_error("--" FLAG ": argument required");
		return -1;
	}
	if (settings[0].value && strcmp(settings[0].value, argument)) {
		slurm_error("--" FLAG " specified multiple times with different values");
		return -1;
	}
	free(settings[0].value);
	settings[0].value = strdup(argument);
	return 0;
}

static struct spank_option option = {
	FLAG, "PATH|NAME", "[lab] run in the container that the environment definition file (EDF) describes",
	1, 0, take
};

int slurm_spank_init(spank_t sp, int ac, char **av)
{
	if (read_arguments(ac, av))
		return -1;
	return spank_option_register(sp, &option) == ESPANK_SUCCESS ? 0 : -1;
}

int slurm_spank_init_post_opt(spank_t sp, int ac, char **av)
{
	(void)sp;
	(void)ac;
	(void)av;
	return settings[0].value && in_client() ? check_settings(settings) : 0;
}

int slurm_spank_user_init(spank_t sp, int ac, char **av)
{
	(void)ac;
	(void)av;
	return settings[0].value ? make_container(sp, settings) : 0;
}

int slurm_spank_task_init(spank_t sp, int ac, char **av)
{
	(void)ac;
	(void)av;
	return enter_task(sp);
}
