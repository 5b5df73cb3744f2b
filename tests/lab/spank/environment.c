/* --environment=PATH|NAME on srun, sbatch and salloc, as the Container Engine has it. */
#define FLAG "environment"
#define SETTING "EDF"
#include "edf_option.h"

SPANK_PLUGIN(environment, 1)
