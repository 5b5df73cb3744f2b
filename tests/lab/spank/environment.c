/* --environment=PATH|NAME on srun, sbatch and salloc, as the Container Engine has it. */
#include "container.h"

SPANK_PLUGIN(environment, 1)

static char *environment_file;

static int take(int value, const char *argument, int remote)
{
	(void)value;
	(void)remote;
	if (!argument || !*argument) {
		slurm_error("--environment: argument required");
		return -1;
	}
	if (environment_file && strcmp(environment_file, argument)) {
		slurm_error("--environment specified multiple times with different values");
		return -1;
	}
	free(environment_file);
	environment_file = strdup(argument);
	return 0;
}

static struct spank_option option = {
	"environment", "PATH|NAME", "[lab] run in the container that the environment definition file (EDF) describes",
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
	char setting[PATH_MAX + 32], here[PATH_MAX];
	char *settings[] = { setting, NULL };

	(void)ac;
	(void)av;
	if (!environment_file || !in_client(sp))
		return 0;
	snprintf(setting, sizeof(setting), PREFIX "EDF=%s", environment_file);
	if (getcwd(here, sizeof(here))) /* a relative path is relative to the caller */
		setenv(PREFIX "HERE", here, 1);
	return check(settings);
}

int slurm_spank_user_init(spank_t sp, int ac, char **av)
{
	(void)ac;
	(void)av;
	if (environment_file && spank_setenv(sp, PREFIX "EDF", environment_file, 1) != ESPANK_SUCCESS)
		return -1;
	if (!environment_file || !last_plugin)
		return 0;
	return announce_script(sp) || start_holder(sp) ? -1 : 0;
}

int slurm_spank_task_init(spank_t sp, int ac, char **av)
{
	(void)ac;
	(void)av;
	return enter_task(sp);
}
