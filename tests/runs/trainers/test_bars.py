"""A program without a known trainer has progress if it draws bars, or prints lines with an epoch, its step and a loss.

The lines are made from the format strings of the programs that are named beside them.
"""

from collections.abc import Iterable
from typing import Any

import pytest

from runner.runs import trainer
from tests.runs.trainers.test_logs import NO_PROJECT, read

BAR = "|#####     |"
# program, its lines, what the last entry says: step, total, loss, seconds per step
FORMATS: list[tuple[str, str, tuple[Any, ...]]] = [
    ("tqdm", f" 12%{BAR} 240/2000 [00:19<02:20, 12.50it/s]", (240, 2000, None, 0.08)),
    ("tqdm, slow", f"  1%{BAR} 2/200 [00:05<08:15,  2.50s/it]", (2, 200, None, 2.5)),
    ("tqdm, postfix", f" 12%{BAR} 24/200 [00:01<00:14, 12.50it/s, loss=2.31]", (24, 200, 2.31, 0.08)),
    (
        "tqdm, postfix of two",
        f" 12%{BAR} 24/200 [00:01<00:14, 12.50it/s, lr=0.1, val_loss=3, loss=2.31]",
        (24, 200, 2.31, 0.08),
    ),
    ("tqdm, no bar", " 12% 24/200 [00:02<00:14, 12.50it/s, loss=2.31]", (24, 200, 2.31, 0.08)),
    ("tqdm, Epoch 2", f"Epoch 2:  12%{BAR} 24/200 [00:01<00:14, 12.50it/s]", (224, None, None, 0.08)),
    ("tqdm, Epoch 2/3", f"Epoch 2/3:  12%{BAR} 24/200 [00:01<00:14, 12.50it/s]", (224, 600, None, 0.08)),
    ("tqdm, Epoch [2/3]", f"Epoch [2/3]:  12%{BAR} 24/200 [00:01<00:14, 12.50it/s, loss=2.31]", (224, 600, 2.31, 0.08)),
    ("tqdm, Training", f"Training:  12%{BAR} 24/200 [00:01<00:14, 12.50batch/s]", (24, 200, None, 0.08)),
    ("tqdm, Train Epoch 1", f"Train Epoch 1:  12%{BAR} 24/200 [00:01<00:14, 12.50it/s]", (24, None, None, 0.08)),
    ("tqdm, loss in front", f"loss 2.31:  12%{BAR} 24/200 [00:01<00:14, 12.50it/s]", (24, 200, 2.31, 0.08)),
    ("tqdm, no end", "24it [00:01, 12.50it/s, loss=2.31]", (24, None, 2.31, 0.08)),
    (
        "diffusers",
        f"Steps:  12%{BAR} 24/200 [00:05<08:20,  1.25s/it, lr=0.0001, step_loss=0.123]",
        (24, 200, 0.123, 1.25),
    ),
    ("sd-scripts", f"steps:  12%{BAR} 24/200 [00:20<33:00,  1.25s/it, avr_loss=0.123]", (24, 200, 0.123, 1.25)),
    (
        "gaussian-splatting",
        f"Training progress:  12%{BAR} 3600/30000 [00:30<03:40, 200.00it/s, Loss=0.0512345]",
        (3600, 30000, 0.0512345, 0.005),
    ),
    ("torchtune", f"1|24|Loss: 2.3125:  12%{BAR} 24/200 [00:10<01:30,  1.25s/it]", (24, 200, 2.3125, 1.25)),
    ("sentence-transformers", f"Iteration:  12%{BAR} 24/200 [00:10<01:30,  1.25s/it]", (24, 200, None, 1.25)),
    (
        "AllenNLP",
        "accuracy: 0.5000, loss: 2.3100 ||:  12%|#2        | 24/200 [00:01<00:14, 12.50it/s]",
        (24, 200, 2.31, 0.08),
    ),
    ("SpeechBrain", f" 12%{BAR} 24/200 [00:01<00:14, 12.50it/s, train_loss=2.31]", (24, 200, 2.31, 0.08)),
    (
        "Composer, bar",
        f"train          Epoch   1:   12%{BAR} 24/200 [00:01<00:14, 12.50ba/s, loss/train/total=2.3100]",
        (24, None, 2.31, 0.08),
    ),
    (
        "NeMo 1",
        f"Epoch 0: :  12%{BAR} 24/200 [00:10<16:30, 2.00it/s, v_num=1, reduced_train_loss=7.25, global_step=19.0]",
        (24, None, 7.25, 0.5),
    ),
    (
        "ViT-pytorch",
        f"Training (24 / 10000 Steps) (loss=2.31234):  12%{BAR} 24/200 [00:01<00:14, 12.50it/s]",
        (24, 200, 2.31234, 0.08),
    ),
    (
        "llama-recipes",
        f"Training Epoch: 1/3, step 23/200 completed (loss: 2.3125):  12%{BAR} 24/200 [00:01<00:14, 12.50it/s]",
        (24, 600, 2.3125, 0.08),
    ),
    (
        "Ultralytics",
        f"      2/100      2.34G      1.234      2.345      1.456         12        640:  12%{BAR} "
        "24/200 [00:03<00:20,  4.00it/s]",
        (224, 20000, None, 0.25),
    ),
    (
        "ImageNet example",
        "Epoch: [1][ 24/200]\tTime  0.250 ( 0.300)\tData  0.001 ( 0.002)\t"
        "Loss 6.9000e+00 (6.9500e+00)\tAcc@1   0.39 (  0.39)",
        (224, None, 6.9, 0.25),
    ),
    (
        "torchvision, DeiT, MAE, DETR, BEiT",
        "Epoch: [1]  [ 24/200]  eta: 0:10:00  lr: 0.000100  loss: 6.9012 (6.9512)  "
        "time: 0.5000  data: 0.0002  max mem: 1234",
        (224, None, 6.9012, 0.5),
    ),
    (
        "LAVIS",
        "Train: data epoch: [1]  [  24/200]  eta: 0:10:00  lr: 0.000001  loss: 6.9000  time: 0.5000  "
        "data: 0.0000  max mem: 9000",
        (224, None, 6.9, 0.5),
    ),
    (
        "timm",
        "Train: 1 [  24/200 ( 12%)]  Loss:  6.954932 (6.9549)  Time: 0.500s,  123.45/s  (0.600s,  123.45/s)  "
        "LR: 1.000e-04  Data: 0.100 (0.100)",
        (224, None, 6.954932, 0.5),
    ),
    (
        "timm, newer",
        "Train: 1 [  24/200 ( 12%)]  Loss: 6.955 (6.95)  Time: 0.500s,  123.45/s  (0.6s, 9/s)  LR: 1e-4",
        (224, None, 6.955, 0.5),
    ),
    (
        "Swin Transformer",
        "[2026-01-02 10:00:00 swin] (main.py 123): INFO Train: [1/300][24/200]\teta 0:10:00 lr 0.000001\t "
        "wd 0.0500\ttime 0.5000 (0.6000)\tloss 6.9012 (6.9512)\tgrad_norm 1.0 (1.0)",
        (224, 60000, 6.9012, 0.5),
    ),
    ("MNIST example", "Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.311", (640, None, 2.311, None)),
    (
        "open_clip",
        "2026-01-02,10:00:00 | INFO | Train Epoch: 1 [  512/12800 (4%)] Data (t): 0.100 Batch (t): 0.300, "
        "1234.5/s LR: 0.000500 Logit Scale: 14.286 Contrastive_loss: 6.8000 (6.9) Loss: 6.9100 (6.9)",
        (512, None, 6.91, None),
    ),
    (
        "mmengine",
        "2026/01/02 10:00:00 - mmengine - INFO - Epoch(train)  [2][ 24/200]  lr: 1.0000e-01  eta: 0:10:00  "
        "time: 0.5000  data_time: 0.0100  memory: 1000  loss: 2.3100",
        (224, None, 2.31, 0.5),
    ),
    (
        "mmengine, iterations",
        "2026/01/02 10:00:00 - mmengine - INFO - Iter(train) [   24/160000]  base_lr: 1.0e-02 "
        "lr: 1.0000e-02  eta: 10:00:00  time: 0.5000  data_time: 0.0100  loss: 2.3100  decode.loss_ce: 1.2",
        (24, 160000, 2.31, 0.5),
    ),
    (
        "mmcv 1",
        "2026-01-02 10:00:00,123 - mmdet - INFO - Epoch [2][24/200]\tlr: 1.000e-02, eta: 0:10:00, time: 0.500, "
        "data_time: 0.050, memory: 3000, loss_cls: 0.5, loss_bbox: 0.3, loss: 2.3100",
        (224, None, 2.31, None),
    ),
    (
        "DINOv2",
        "I20260102 10:00:00 123 dinov2 helpers.py:102] Training  [    24/125000]  eta: 1 day, 0:10:00  lr: 0.0001 "
        "(0.0001)  total_loss: 11.5000 (11.4000)  time: 0.500000  data: 0.0001  max mem: 9000",
        (24, 125000, 11.5, 0.5),
    ),
    (
        "PaddleDetection",
        "[01/02 10:00:00] ppdet.engine INFO: Epoch: [1] [ 24/200] learning_rate: 0.000100 "
        "loss_cls: 1.0 loss: 2.310000 eta: 0:10:00",
        (224, None, 2.31, None),
    ),
    (
        "PaddleClas",
        "[2026/01/02 10:00:00] ppcls INFO: [Train][Epoch 2/20][Iter: 24/200]lr(LinearWarmup): 0.1, top1: 0.1, "
        "CELoss: 6.9, loss: 2.3100, batch_cost: 0.5s",
        (224, 4000, 2.31, None),
    ),
    (
        "fairseq",
        "2026-01-02 10:00:00 | INFO | train_inner | epoch 002:     24 / 200 loss=9.125, nll_loss=8.5, ppl=362, "
        "wps=1000, num_updates=224, lr=1e-05",
        (224, None, 9.125, None),
    ),
    (
        "fairseq, older",
        "| epoch 002:     24 / 200 loss=9.125, nll_loss=8.5, ppl=362, wps=1000",
        (224, None, 9.125, None),
    ),
    (
        "word_language_model",
        "| epoch   2 |    24/  200 batches | lr 20.00 | ms/batch 12.50 | loss  7.63 | ppl  2051.11",
        (224, None, 7.63, 0.0125),
    ),
    (
        "flair",
        "2026-01-02 10:00:00,123 epoch 2 - iter 24/200 - loss 2.31250000 - time (sec): 12.30 - samples/sec: 123.4",
        (224, None, 2.3125, None),
    ),
    ("pytorch-tutorial", "Epoch [2/5], Step [24/200], Loss: 2.3100", (224, 1000, 2.31, None)),
    ("a loop", "Epoch 1 | Step 20/400 | loss: 2.3", (20, None, 2.3, None)),
    ("a loop with =", "Epoch=2 Step=24/200 loss=2.3", (224, None, 2.3, None)),
    ("a loop that starts a line again", "\x1b[2K[Epoch 2] [24/200] train_loss=2.3 lr=0.1", (224, None, 2.3, None)),
    (
        "PyTorch-GAN",
        "[Epoch 1/200] [Batch 24/938] [D loss: 0.500000] [G loss: 1.200000]",
        (24, 187600, 0.5, None),
    ),
    ("ignite", f"Epoch [2/5]: [24/200]  12%{BAR}, loss=2.31 [00:01<00:14]", (224, 1000, 2.31, None)),
    (
        "DLRM",
        "Finished training it 24/200 of epoch 1, 12.50 ms/it, loss 0.450123, accuracy 78.0 %",
        (224, None, 0.450123, 0.0125),
    ),
    (
        "Keras 2",
        "Epoch 2/3\n 24/200 [==>...........................] - ETA: 5s - loss: 2.3100 - accuracy: 0.1000",
        (224, 600, 2.31, None),
    ),
    (
        "Keras 3",
        "Epoch 2/3\n\x1b[1m 24/200\x1b[0m \x1b[32m━━\x1b[0m\x1b[37m━━━━━━━━\x1b[0m \x1b[1m5s\x1b[0m 50ms/step - "
        "accuracy: 0.1000 - loss: 2.3100",
        (224, 600, 2.31, 0.05),
    ),
    ("MONAI", "epoch 2/3\n24/200, train_loss: 2.3100", (224, 600, 2.31, None)),
    (
        "PyTorch quickstart",
        "Epoch 2\n-------------------------------\nloss: 2.303494  [   64/60000]",
        (60064, None, 2.303494, None),
    ),
    (
        "OLMo",
        "2026-01-02 10:00:00.000\thost:0\tolmo.train:864\tINFO\t[step=24/200,epoch=0]\n"
        "    optim/total_grad_norm=1.0\n    train/CrossEntropyLoss=10.98\n    train/Perplexity=58,000",
        (24, 200, 10.98, None),
    ),
    (
        "Composer, console",
        "[batch=24/200]:\n\t Train time/batch: 23\n\t Train loss/train/total: 11.2500",
        (24, 200, 11.25, None),
    ),
    (
        "litgpt",
        "Epoch 1 | iter 24 step 12 | loss train: 2.310, val: n/a | iter time: 123.45 ms (step) remaining time: 1:00",
        (12, None, 2.31, None),
    ),
    ("TensorFlow estimator", "INFO:tensorflow:loss = 2.31, step = 24 (1.234 sec)", (24, None, 2.31, None)),
    (
        "detectron2",
        "[01/02 10:00:00 d2.utils.events]:  eta: 0:10:00  iter: 24  total_loss: 2.31  loss_cls: 1.2  "
        "time: 0.5000  data_time: 0.0100  lr: 0.0001  max_mem: 1234M",
        (24, None, 2.31, None),
    ),
    (
        "llm.c",
        "step   24/200 | loss 2.310000 (+nanz)| norm 1.0 (+nanz)| lr 6.00e-04 | 123.45 ms | 50% bf16 MFU",
        (24, 200, 2.31, None),
    ),
    (
        "MaxText",
        "completed step: 24, seconds: 0.500, TFLOP/s/device: 100.0, Tokens/s/device: 1000.0, loss: 2.310",
        (24, None, 2.31, None),
    ),
    ("modded-nanogpt", "step:24/200 val_loss:3.3 train_loss:2.3100 train_time:1000ms", (24, 200, 2.31, None)),
    (
        "GPT-NeoX",
        " samples/sec: 1.234 | iteration       24/     200 | elapsed time per iteration (ms): 123.4 | "
        "learning rate: 1.000E-05 | approx flops per GPU: 1.0TFLOPS | lm_loss: 2.310000E+00 | loss scale: 4096.0 |",
        (24, 200, 2.31, None),
    ),
    ("PaddleNLP", "global step 24, epoch: 0, batch: 23, loss: 2.310000, speed: 1.23 step/s", (24, None, 2.31, None)),
    (
        "Model Garden",
        "train | step:     24 | steps/sec:    5.0 | output: {'training_loss': 2.31}",
        (24, None, 2.31, None),
    ),
    (
        "nanotron",
        "01/02/2026 10:00:00 [INFO|DP=0|PP=0|TP=0|nid001]: iteration: 24 / 200 | consumed_tokens: 25.2M | "
        "tokens_per_sec: 853K | global_batch_size: 1.05M | grad_norm: 1.2 | lm_loss: 2.31 | lr: 0.0003",
        (24, 200, 2.31, None),
    ),
    (
        "lingua",
        "0: INFO    26-01-02 10:00:00.123456 - 0:10:00 - step: 24  acc: 0  loss:    2.31  grad: 1.20e+00  "
        "flops: 3.21e+14  wps: 1.20e+04  iter:  0.512  lr: 3.00e-04",
        (24, None, 2.31, None),
    ),
    (
        "OLMo-core, no end",
        "2026-01-02 10:00:00.000\tnid001:0\tconsole_logger:92\tINFO\t[step=24/???,epoch=1]\n    train/CE loss=2.310",
        (24, None, 2.31, None),
    ),
    (
        "picotron",
        "[rank 2] Step: 24    | Loss: 2.3100 | Global batch size:   2.05K | Tokens/s:  10.61K | Tokens: 6.14K/20.00M",
        (24, None, 2.31, None),
    ),
    (
        "NeMo RL",
        "========================= Step 24/200 =========================\n▶ Taking a training step...\n"
        "📊 Training Results:\n  • Loss: 2.3100\n  • Critic Loss: 0.5100\n  • Total step time: 1.25s",
        (24, 200, 2.31, None),
    ),
    (
        "NeMo RL, PPO",
        "===== Step 3/50 =====\n▶ Step 1/4...\n    • Policy loss: 0.0210\n    • Value loss: 0.5\n  • Loss: 0.0200",
        (3, 50, 0.02, None),
    ),
    (
        "RSL-RL",
        "################\n             \x1b[1m Learning iteration 24/1500 \x1b[0m             \n\n"
        "       Total steps: 2457600 \n   Mean value loss: 0.0231\n   Mean surrogate loss: -0.0100",
        (24, 1500, None, None),
    ),
    (
        "fairseq2",
        "[01/02/26 10:00:00] INFO     fairseq2 - Train Metrics (step 24) - NLL Loss: 2.31 | Gradient Norm: 1.2\n"
        "[01/02/26 10:00:00] INFO     fairseq2 - Validation Metrics (step 24) - NLL Loss: 2.9",
        (24, None, 2.31, None),
    ),
    (
        "DeePMD-kit",
        "[2026-01-02 10:00:00,000] DEEPMD INFO    Batch    2400: trn: rmse = 1.20e+00, lr = 1.00e-03\n"
        "[2026-01-02 10:00:00,000] DEEPMD INFO    Batch    2400: total wall time = 3.20 s, eta = 0:10:00",
        (2400, None, None, None),
    ),
    (
        "OpenRLHF",
        f"Train step of epoch 1:  12%{BAR} 24/200 [00:30<03:40,  1.25s/it, gpt_loss=2.31, lr=1e-5]\n"
        f"Eval stage of steps 224:  50%{BAR} 5/10 [00:03<00:03,  1.25it/s, eval gpt_loss=2.9]",
        (224, None, 2.31, 1.25),
    ),
    ("DiT", "[2026-01-02 10:00:00] (step=0000024) Train Loss: 0.1600, Train Steps/Sec: 2.50", (24, None, 0.16, None)),
    (
        "SAM 2",
        "INFO train_utils.py: 271: Train Epoch: [1][ 24/200] | Batch Time: 1.25 (1.30) | Mem (GB): 20.00 (19/21) | "
        "Losses/train_all_loss: 2.31e+00 (2.50e+00)\nINFO train_utils.py: 271: Val Epoch: [1][ 30/ 40] | "
        "Batch Time: 1.25 (1.30) | Losses/val_all_loss: 9.1e+00 (9.0e+00)",
        (224, None, 2.31, 1.25),
    ),
    (
        "modded-nanogpt, newer",
        "step:0/200 val_loss:10.8258 train_time:0ms step_avg:0.02ms\nstep:24/200 train_time:2400ms step_avg:100.00ms",
        (24, 200, None, None),
    ),
    (
        "minimind",
        "Epoch:[2/3](24/200), loss: 2.3100, logits_loss: 2.3, aux_loss: 0.0000, lr: 0.00050000, epoch_time: 10.000min",
        (224, 600, 2.31, None),
    ),
    (
        "YOLOX",
        "2026-01-02 | INFO     | yolox.core.trainer:250 - epoch: 2/300, iter: 24/200, gpu mem: 5000Mb, "
        "iter_time: 0.500s, data_time: 0.001s, total_loss: 12.3, iou_loss: 3.1, lr: 1.000e-02",
        (224, 60000, 12.3, None),
    ),
    ("DeepSpeed's pipeline", "steps: 24 loss: 2.3100 iter time (s): 0.500 samples/sec: 6.805", (24, None, 2.31, 0.5)),
    (
        "prime-rl",
        "\x1b[2m10:00:00\x1b[0m \x1b[32mSUCCESS\x1b[0m Step 24 |   1.25s | Loss 2.3100 | Entropy 0.5000\n"
        "10:00:00   DEBUG Micro Step 25/32 | Loss 9.9000 | Entropy 0.5000\n"
        "10:00:00 SUCCESS Validation | Step 25 | Loss 9.9000",
        (24, None, 2.31, None),
    ),
    (
        "xtuner",
        "INFO | x - Epoch 1 Step 99/200 lr: 1e-05 time: 1.2500 text_tokens: 8192.0 local_loss: 2.40 grad_norm: 1.2\n"
        "INFO | x - Epoch 2 Step 101/200 lr: 1e-05 time: 1.2500 text_tokens: 8192.0 local_loss: 2.31 grad_norm: 1.2",
        (101, 200, 2.31, None),
    ),
    (
        "slime",
        "\x1b[36m(MegatronTrainRayActor pid=4112)\x1b[0m [2026-01-02 10:00:00] model.py:918 - step 24: "
        "{'train/loss': 0.0231, 'train/pg_loss': 0.02, 'train/grad_norm': 0.1, 'train/step': 24}",
        (24, None, 0.0231, None),
    ),
    (
        "ai-toolkit",
        f"my_lora_v1:  12%{BAR} 240/2000 [05:00<36:40,  1.25s/it, lr: 1.0e-04 loss: 2.310e-01]",
        (240, 2000, 0.231, 1.25),
    ),
    (
        "AudioCraft",
        "[01-02 10:00:00][flashy.solver][INFO] - Train | Epoch 2 | 24/200 | 2.50 it/sec | ce 2.300 | loss 2.31000\n"
        "[01-02 10:00:00][flashy.solver][INFO] - Valid | Epoch 2 | 34/200 | 2.50 it/sec | loss 9.90000",
        (224, None, 2.31, None),
    ),
    (
        "metaseq, JSON of fairseq",
        '2026-01-02 | INFO | train_inner | {"epoch": 1, "loss": "11.55", "ppl": "3000.1", "num_updates": "24"}',
        (24, None, 11.55, None),
    ),
    ("JSON", '{"epoch": 0, "loss": 2.31, "lr": 0.0001, "step": 24, "time": 1.5}', (24, None, 2.31, None)),
    (
        "NeMo 2, with SkyPilot",
        "(pretraining, pid=4112) Training epoch 2, iteration 10/999 | lr: 7.346e-06 | global_batch_size: 512 | "
        "global_step: 48 | reduced_train_loss: 11.02 | train_step_timing in s: 46.81 | consumed_samples: 25088",
        (48, 999, 11.02, 46.81),
    ),
    (
        "DETR",
        "Epoch [1/50] Train: [ 8/9]  Time  2.345 ( 2.345)  Data  0.123 ( 0.123)  Loss 1.4321e+00 (1.4321e+00)",
        (8, 450, 1.4321, 2.345),
    ),
    (
        "NeuronX Distributed",
        "step 8 step_time 285.018s throughput 2.853 seq/s loss 1.69223 grad norm 10.5625",
        (8, None, 1.69223, None),
    ),
    (
        "Keras with verbose=2",
        "Epoch 1/24\n195/195 - 147s - loss: 0.1119 - 147s/epoch - 753ms/step\n"
        "Epoch 2/24\n195/195 - 92s - 472ms/step - accuracy: 0.9 - loss: 0.1164",
        (390, 4680, 0.1164, None),
    ),
    ("sklearn", "Iteration 24, loss = 0.45123456", (24, None, 0.45123456, None)),
]


def last(text: str) -> tuple[Any, ...]:
    _, entries = read(text.encode() + b"\n", trainer.readable(trainer.render(None, NO_PROJECT)))
    if not entries:
        return ()
    return tuple(entries[-1].get(key) for key in ("step", "total_steps", "loss", "step_seconds"))


@pytest.mark.parametrize(
    ("text", "values"), [(text, values) for _, text, values in FORMATS], ids=[n for n, *_ in FORMATS]
)
def test_a_format(text: str, values: tuple[Any, ...]) -> None:
    assert last(text) == values


NOTHING = [
    f"model.safetensors:  12%{BAR} 512M/4.98G [00:05<00:44, 102MB/s]",
    f"Downloading data:  12%{BAR} 24/200 [00:10<01:00,  2.50files/s]",
    f" 12%{BAR} 24/200 [00:10<01:00, 2.50kB/s]",
    f" 12%{BAR} 24/200 [00:10<01:00, 2.50MB/s]",
    f" 12%{BAR} 24.0/200 [00:10<01:00, 2.50GB/s]",
    f" 12%{BAR} 24/200 [00:10<01:00, 2.50file/s]",
    f"Map:  12%{BAR} 24/200 [00:10<01:00, 2.50 examples/s]",
    f"Map (num_proc=4):  12%{BAR} 24/200 [00:10<01:00, 2.50it/s]",
    f"Filter:  12%{BAR} 24/200 [00:10<01:00, 2.50 examples/s]",
    f"Tokenizing train dataset:  12%{BAR} 24/200 [00:10<01:00, 2.50it/s]",
    f"Tokenizing:  12%{BAR} 24/200 [00:10<01:00, 2.50it/s]",
    f"Running tokenizer on train dataset:  12%{BAR} 24/200 [00:10<01:00, 2.50ba/s]",
    f"Training tokenizer:  12%{BAR} 24/200 [00:10<01:00, 2.50it/s]",
    f"Train dataset:  12%{BAR} 24/200 [00:10<01:00, 2.50it/s]",
    f"Step 1: extracting:  12%{BAR} 24/200 [00:10<01:00, 2.50it/s]",
    f"Iterating over files:  12%{BAR} 24/200 [00:10<01:00, 2.50it/s]",
    f"Preprocessing:  12%{BAR} 24/200 [00:10<01:00, 2.50it/s]",
    f"Generating train split:  12%{BAR} 24/200 [00:10<01:00, 2.50 examples/s]",
    "Generating train split: 1000 examples [00:10, 99.50 examples/s]",
    f"Loading checkpoint shards:  12%{BAR} 1/8 [00:10<01:00, 10.00s/it]",
    "Loading safetensors checkpoint shards:  12% Completed | 1/8 [00:10<01:10, 10.00s/it]",
    f"Fetching 24 files:  12%{BAR} 3/24 [00:10<01:00, 2.50it/s]",
    f"Evaluating:  12%{BAR} 24/200 [00:10<01:00, 2.50it/s]",
    f"Evaluating:  12%{BAR} 24/200 [00:10<01:00, 2.50it/s, loss=2.31]",
    f"Validation DataLoader 0:  12%{BAR} 24/200 [00:10<01:00, 2.50it/s]",
    f"Sanity Checking DataLoader 0:  50%{BAR} 1/2 [00:10<00:10, 10.00s/it, loss=2.31]",
    f"Validating:  12%{BAR} 24/200 [00:10<01:00, 2.50it/s, loss=2.31]",
    f"Epoch 1 (val):  12%{BAR} 24/200 [00:10<01:00, 2.50it/s, loss=2.31]",
    f"Epoch 1/3 [valid]:  12%{BAR} 24/200 [00:10<01:00, 2.50it/s]",
    f"Testing:  12%{BAR} 24/200 [00:10<01:00, 2.50it/s, loss=2.31]",
    f"test loss 2.3:  12%{BAR} 24/200 [00:10<01:00, 2.50it/s]",
    f"Processed prompts:  12%{BAR} 24/200 [00:10<01:00, 2.50it/s, est. speed input: 1.0 toks/s]",
    f"Epoch:  33%{BAR} 1/3 [10:00<20:00, 600.00s/it]",
    f"100%{BAR} 200/200 [00:02<00:00, 100.00it/s]",  # of a quick preparation
    f" 12%{BAR} 24/200 [00:01<00:07, 25.00it/s]",
    f"  1%{BAR} 2/2000 [00:02<33:00,  1.00s/it]",  # only its start may be slow
    f" 12%{BAR} 2400/20000 [00:12<01:00, 320.00it/s]",
    f"  0%{BAR} 0/200 [00:00<?, ?it/s]",
    "   ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 12.3/45.6 MB 12.5 MB/s eta 0:00:05",
    "   ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 24/200 [torch]",
    "     |████████████████████████████████| 12.3 MB 45.6 MB/s",
    "[24/200] Building CXX object loss.cpp.o",
    "Epoch(val) [1][24/200]    eta: 0:00:10  time: 0.1  data_time: 0.1  loss: 2.31",
    "Iter(val) [24/200]    eta: 0:00:10  time: 0.1  loss: 2.31",
    "Test: [ 24/200]\tTime  0.250 ( 0.300)\tLoss 2.31 (2.31)\tAcc@1   0.39 (  0.39)",
    "Test: [  24/200]  Time: 0.250 (0.250)  Loss:  2.3100 (2.31)  Acc@1: 40.0 (40.0)",
    "Test:  [ 24/200]  eta: 0:00:10  loss: 2.3100 (2.31)  time: 0.1  data: 0.1  max mem: 100",
    "Test Epoch: [1][24/200] Loss 2.31",
    "Val: Epoch: [1][24/200] Loss 2.31",
    "Epoch: [1][24/200] val_loss: 2.31",
    "Epoch [1/5], Step [24/200], Val Loss: 2.31",
    "Test set: Average loss: 0.0274, Accuracy: 9913/10000 (99%)",
    "Test Error: \n Accuracy: 40.1%, Avg loss: 2.15",
    "step:24/200 val_loss:3.3",
    "Epoch 3/10",
    "Epoch 3/10, loss: 2.5",
    "Epoch 3: train loss 2.3, val loss 2.2",
    "Epoch: [1] Total time: 0:10:00 (0.5 s / it)",
    "epoch 3 01/02/2026 loss 2.5",
    "Epoch [1/5], Step [240/200], Loss: 2.3100",
    "interval 24/200 loss 2.5",
    "Namespace(lr=0.1, save_step=500, z_loss=0.001, seed=1)",
    "python train.py --save-step 500 --lr 0.1 --aux_loss 0.1",
    "{'train': {'max_iter': 1000, 'loss': 1.0}}",
    "Epoch 2 Step 3000 CV info lr [0.001] cv_loss 23.1 rank 0 acc 0.5",  # WeNet
    "[eval] step 24 loss 9.9",
    "Evaluation at step 24: loss 9.9",
    "step 24 | validation | loss 9.9",
    '{"eval": {"step": 24, "loss": 9.9}}',
    "micro_step 3 loss 9.9",
    "inner step 3/8 loss 9.9",
    "Early stopping at step 24: loss not improving",
    "INFO (0/4) Epoch 2, validation: loss=0.25, simple_loss=0.3, over 900.0 frames.",  # icefall
    "INFO: Epoch 12: head: Default, loss=0.01234567, RMSE_E_per_atom=    1.20 meV",  # MACE: of the validation
    "\titers: 100, epoch: 1 | loss: 0.2312345",  # Time-Series-Library: the epoch's length is not known
    "24:\tlearn: 0.5\ttest: 0.6\tbest: 0.6 (20)\ttotal: 1.2s\tremaining: 3s",
    "Validation | Epoch 2 | 24/200 | loss 2.31",
]


@pytest.mark.parametrize("text", NOTHING)
def test_other_bars_are_not_the_training(text: str) -> None:
    """Downloads, the preparation of data, the loading of a model, evaluations, and lines with an epoch but no step."""
    assert last(text) == ()


PREFIXES = [
    "0: ",
    "12: ",
    "[rank0]:",
    "[rank0]: ",
    "[default0]:",
    "\x1b[32m",
    "2026-01-02 10:00:00,123 INFO ",
    "[1,0]<stdout>:",
]
LINES = [
    (f"Epoch 2/3:  12%{BAR} 24/200 [00:01<00:14, 12.50it/s, loss=2.31]", (224, 600, 2.31, 0.08)),
    ("Epoch: [1][ 24/200]\tTime  0.250 ( 0.300)\tLoss 6.9 (6.9)", (224, None, 6.9, 0.25)),
]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(("text", "values"), LINES, ids=["bar", "epoch"])
def test_a_line_with_a_label(prefix: str, text: str, values: tuple[Any, ...]) -> None:
    """Of srun, torchrun, mpirun or logging."""
    assert last(f"\r{prefix}{text}\r") == values


def bar(step: int, total: int, seconds: int, words: str = "", pace: float = 0.5) -> str:
    left = int((total - step) * pace)
    times = [f"{each // 60:02}:{each % 60:02}" for each in (seconds, left)]
    return f"{words}{100 * step // total:3}%{BAR} {step}/{total} [{times[0]}<{times[1]}, {pace:.2f}s/it]\n"


def each_epoch(epochs: Iterable[int], steps: Iterable[int], line: str = "step {} epoch {} loss 2\n") -> str:
    return "".join(line.format(step, epoch) for epoch in epochs for step in steps)


SHORT = bar(1, 20, 0) + bar(10, 20, 5) + bar(14, 20, 7) + bar(20, 20, 10)
EPOCH_200 = bar(1, 200, 0) + bar(60, 200, 30) + bar(120, 200, 60) + bar(200, 200, 100)
# what happens, the log, the step and the total at its end
SEQUENCES: list[tuple[str, str, int | None, int | None]] = [
    ("the next epoch", EPOCH_200 + bar(0, 200, 0) + bar(24, 200, 12), 224, None),
    ("the next epoch is complete", EPOCH_200 * 2, 400, None),
    ("an epoch of 10 s", SHORT + SHORT + bar(1, 20, 0) + bar(8, 20, 4), 48, None),
    ("slow steps after a preparation", SHORT + bar(0, 200, 0, pace=60) + bar(1, 200, 60, pace=60), 1, 200),
    ("a slower rank", EPOCH_200 + bar(0, 200, 0) + bar(200, 200, 100) + bar(24, 200, 12), 224, None),
    ("an evaluation after each epoch", (EPOCH_200 + bar(1, 40, 0) + bar(40, 40, 20)) * 2, 400, None),
    (
        "a preparation before the training",
        SHORT + bar(12, 200, 6) + bar(60, 200, 30),
        60,
        200,
    ),
    ("a bar of the epochs", EPOCH_200 + bar(1, 3, 100, pace=100) + EPOCH_200, 400, None),
    (
        "an evaluation with a loss",
        "Epoch 1/2\n200/200 [==] - 5s 25ms/step - loss: 2.5\n40/40 [==] - 1s 25ms/step - loss: 2.6\n",
        200,
        400,
    ),
    (
        "Keras, two epochs",
        "Epoch 1/2\n200/200 [====] - 5s 25ms/step - loss: 2.5 - val_loss: 2.6\nEpoch 2/2\n"
        "24/200 [=>..] - ETA: 5s - loss: 2.4\n",
        224,
        400,
    ),
    ("steps that go on over the epochs", "epoch 1 step 500/1200 loss 2\nepoch 2 step 700/1200 loss 2\n", 700, 1200),
    ("steps that go on, resumed", "epoch 3 step 2500/9000 loss 2\nepoch 4 step 3500/9000 loss 2\n", 3500, 9000),
    ("steps of each epoch, resumed", "epoch 3 step 100/600 loss 2\nepoch 3 step 500/600 loss 2\n", 1700, None),
    ("steps of each epoch", "epoch 1 step 500/600 loss 2\nepoch 2 step 100/600 loss 2\n", 700, None),
    ("epochs from 0", "epoch 0 step 500/600 loss 2\nepoch 1 step 100/600 loss 2\n", 700, None),
    ("epochs of unknown length, from 0", each_epoch((0, 1, 2), range(0, 1000, 10)), 2990, None),
    ("epochs of unknown length, from 1", each_epoch((1, 2, 3), range(100, 1001, 100)), 3000, None),
    ("a line for each epoch of unknown length", each_epoch((1, 2, 3), (1000,)), 3000, None),
    (
        "epochs of a length that is not theirs",
        each_epoch((1, 2), (100, 200), "step {}/200 epoch {} loss 2\n"),
        400,
        None,
    ),
    ("steps that go on, of an unknown length", "epoch 1 step 500 loss 2\nepoch 2 step 700 loss 2\n", 700, None),
    ("a slower rank of an unknown length", each_epoch((1, 2), (100, 200)) + "epoch 1 step 200 loss 2\n", 400, None),
    ("a loss of the last epoch", "epoch 1 step 600/600 loss 2\nepoch 2 step 600/600 loss 2\n", 1200, None),
]


@pytest.mark.parametrize(
    ("log", "step", "total"), [each[1:] for each in SEQUENCES], ids=[each[0] for each in SEQUENCES]
)
def test_several_bars(log: str, step: int | None, total: int | None) -> None:
    """Also if the log is read in parts."""
    for part_bytes in (None, 0, 100):
        _, entries = read(log.encode(), trainer.readable(trainer.render(None, NO_PROJECT)), part_bytes)
        assert (entries[-1]["step"], entries[-1].get("total_steps")) == (step, total)
        assert entries == sorted(entries, key=lambda entry: entry["step"])


def test_a_known_trainer_wins() -> None:
    """Whatever the bars counted before."""
    plain = bar(60, 200, 30) + bar(70, 200, 35, "Epoch 2/3:")
    with_loss = bar(80, 200, 40, "Training: ")[:-2] + ", loss=3]\n"
    nanochat = "step 3/10 | loss: 2.5 | lrm: 1 | dt: 1.0ms | tok/sec: 10\n"
    for log, expected in (
        (plain + "step 3/10 loss 2.5\n", "generic"),
        (plain + nanochat, "nanochat"),
        (with_loss + nanochat, "nanochat"),
    ):
        for part_bytes in (None, 0):
            found, entries = read(log.encode(), trainer.readable(trainer.render(None, NO_PROJECT)), part_bytes)
            assert (found, [entry["step"] for entry in entries]) == (expected, [3])


def test_a_bar_that_is_drawn_ten_times_per_second_is_read_quickly() -> None:
    """Of drawings one after the other only some are read; the first, the last and the order of epochs count."""
    epoch = "".join(bar(step, 2000, step // 10, "Training: ", 0.1) for step in range(2001)).replace("\n", "\r")
    (entry,) = read((epoch * 3).encode(), trainer.readable(trainer.render(None, NO_PROJECT)))[1]
    assert (entry["step"], entry["step_seconds"]) == (6000, 0.1)
