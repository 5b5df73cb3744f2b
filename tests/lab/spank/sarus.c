/* --edf=PATH|NAME on srun, sbatch and salloc, as Skybox of Sarus Suite has it. A stand-in that follows the user guide of
 * CSCS (2026-08-20) and sarus-suite/skybox@e8bd547: the container is the lab's, not podman's. */
#define FLAG "edf"
#define SETTING "SARUS_EDF"
#include "edf_option.h"

SPANK_PLUGIN(sarus, 1)
