"""One block of each family worked out by hand, so that a reader can check the arithmetic with a pencil."""

import torch

from hqsweep.formats import parse


def encode(text, *rows):
    x = torch.tensor(rows, dtype=torch.float32)
    format = parse(text)
    buffers = format.encode(x)
    return buffers, format.decode(buffers, tuple(x.shape))


def test_mxfp8_block():
    # amax 5 -> 5/448 = 0.01116 lies between 2^-7 and 2^-6: scale 2^-6, byte 121. 5 * 64 = 320 = 1.25 * 2^8 -> 0x7A.
    # 0.3 * 64 = 19.2, steps of 2 between 16 and 32 -> 20 = 1.25 * 2^4 -> 0x5A, decoded 20/64 = 0.3125.
    buffers, decoded = encode("mxfp8", [5.0, 0.3, -0.3, 0.0] + [0.0] * 28)
    assert buffers["s"].tolist() == [[121]]
    assert buffers["q"][0, :4].tolist() == [0x7A, 0x5A, 0xDA, 0x00]
    assert decoded[0, :4].tolist() == [5.0, 0.3125, -0.3125, 0.0]


def test_mxfp4_block_packs_the_even_element_low():
    # amax 6 -> scale exactly 1. 2.5 ties between 2 and 3: even mantissa is 2 (code 4). -0.8 -> -1 (code 10).
    buffers, decoded = encode("mxfp4", [6.0, 2.5, -0.8, 0.2] + [0.0] * 28)
    assert buffers["s"].tolist() == [[127]]
    assert buffers["q"][0, :2].tolist() == [0x47, 0x0A]
    assert decoded[0, :4].tolist() == [6.0, 2.0, -1.0, 0.0]


def test_nvfp4_block():
    # A = 12, S_enc = 2688/12 = 224. First block: b = 12 -> sf = 12/6*224 = 448 (0x7E), s = 1/(448/224) = 0.5: 12 -> 6.
    # Second: b = 3 -> sf = 112 (0x6E), s = 2: 3 -> 6, 1 -> 2, decoded 2 * 112 * 12 / 2688 = 1.
    buffers, decoded = encode("nvfp4", [12.0] + [0.0] * 15 + [3.0, 1.0] + [0.0] * 14)
    assert buffers["g"].tolist() == [[12.0]]
    assert buffers["s"].tolist() == [[0x7E, 0x6E]]
    assert buffers["q"][0, 0] == 0x07 and buffers["q"][0, 8] == 0x47
    assert decoded[0, 0] == 12.0 and decoded[0, 16:18].tolist() == [3.0, 1.0]


def test_fp8_current_scale_is_one_number():
    # amax 7 -> scale 64, scale_inv 1/64; 7 * 64 = 448 -> 0x7E; 1 * 64 = 2^6 -> 0x68.
    buffers, decoded = encode("fp8_current", [7.0, 1.0], [-7.0, 0.0])
    assert buffers["s"].tolist() == [[1 / 64]]
    assert buffers["q"].tolist() == [[0x7E, 0x68], [0xFE, 0x00]]
    assert decoded.tolist() == [[7.0, 1.0], [-7.0, 0.0]]


def test_nvfp4_tensor_has_one_scale_and_no_more():
    # amax 12 -> scale 6/12 = 0.5, scale_inv 2. 12 -> 6 (0x7), -3 -> -1.5 (0xB), 1 -> 0.5 (0x1); 0.5 -> 0.25 ties to 0,
    # 5 -> 2.5 ties to 2 (0x4). In the second row a scale of the block's own would keep the 0.5.
    rows = [12.0, -3.0, 1.0, 5.0] + [0.0] * 12, [0.5] + [0.0] * 15
    buffers, decoded = encode("nvfp4+tensor", *rows)
    assert buffers["s"].tolist() == [[2.0]] and list(buffers) == ["q", "s"]
    assert buffers["q"][:, :2].tolist() == [[0xB7, 0x41], [0x00, 0x00]]
    assert decoded[0, :4].tolist() == [12.0, -3.0, 1.0, 4.0] and decoded[1, 0] == 0.0
    assert encode("mxfp4", *rows)[1][1, 0] == 0.5
    # +pow2: 6/10 truncates to 0.5, scale_inv 2: 10 -> 5, halfway between 4 and 6 -> 4 (even), decoded 8.
    buffers, decoded = encode("nvfp4+tensor+pow2", [10.0] + [0.0] * 15)
    assert buffers["s"].tolist() == [[2.0]] and decoded[0, 0] == 8.0


def test_fp8_block_has_a_scale_for_128_elements_and_takes_a_partial_block():
    buffers, decoded = encode("fp8_block", [1.0] * 128 + [100.0, 3.0])
    # 448/1 truncates to 256, 448/100 = 4.48 to 4. 100 * 4 = 400 ties between 384 and 416: the even mantissa is 384.
    assert buffers["s"].tolist() == [[1 / 256, 1 / 4]]
    assert decoded[0, 127:].tolist() == [1.0, 96.0, 3.0]


def test_row_scaled_nvfp4_keeps_rows_apart():
    rows = ([6.0] + [1.0] * 15, [600.0] + [100.0] * 15)
    assert encode("nvfp4+row_scaled", *rows)[0]["g"].tolist() == [[6.0], [600.0]]
    _, decoded = encode("nvfp4+row_scaled", *rows)
    assert decoded[0].tolist() == rows[0]
