/* Options that plug-ins of other clusters add to sbatch and srun. They are accepted and do nothing. */
#include <slurm/spank.h>

SPANK_PLUGIN(options, 1)

static int take(int value, const char *argument, int remote)
{
	(void)value;
	(void)argument;
	(void)remote;
	return 0;
}

static const char *names[] = { "environment", "image", "module", "uenv", "volume", 0 };

int slurm_spank_init(spank_t sp, int ac, char **av)
{
	(void)ac;
	(void)av;
	for (int i = 0; names[i]; i++) {
		struct spank_option option = { (char *)names[i], "VALUE", "[lab] accepted, without effect", 1, 0, take };
		if (spank_option_register(sp, &option) != ESPANK_SUCCESS)
			return -1;
	}
	return 0;
}
