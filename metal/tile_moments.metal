// Statistics of the rows that matrix tiles write, for the norm that follows: how many
// rows, and of each channel their mean and the sum of squares about it, as
// channel_moments of channel_norms.metal writes them.
//
//   lane: four channels of the rows that it writes --> lanes with the same channels
//     --> simdgroups with the same columns, in order --> a line for each tile
//
// Of the values that are written, rounded; a lane's about its first row, joined by their
// means (Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for
// Computing Sample Variances", 1979), so that a large mean cancels nothing. No atomics,
// one order by sizes: the same bits on every run. Traffic: 12 bytes a channel for 64
// rows, where the norm would read them again. Reads matrix_tiles.metal too.

// Of tiles that are asked for none.
struct NoMoments {
  template <typename LINE>
  METAL_FUNC void add(int, const thread LINE&) thread {}

  template <int COLUMNS, int WIDTH, int GROUPS>
  METAL_FUNC void write(threadgroup float*, int, int, int, int, int) const thread {}

  METAL_FUNC void write(int, int, int, int) const thread {}
};

// Of four channels and some rows.
struct FourMoments {
  float rows;
  float4 mean, squares;

  METAL_FUNC FourMoments() thread : rows(0.0f), mean(0.0f), squares(0.0f) {}

  METAL_FUNC void join(float more, float4 their_mean, float4 their_squares) thread {
    const float all = rows + more, share = all > 0.0f ? more / all : 0.0f;
    const float4 d = their_mean - mean;
    mean += share * d;
    squares += their_squares + (share * rows) * d * d;
    rows = all;
  }

  // Joins the lane whose number differs in one bit.
  METAL_FUNC void join_lane(ushort bit) thread {
    join(
        simd_shuffle_xor(rows, bit), simd_shuffle_xor(mean, bit),
        simd_shuffle_xor(squares, bit));
  }

  // Writes those of the channels that there are, from c on, into a line.
  METAL_FUNC void write(device float* lines, int line, int c, int c_y) const thread {
    device float* to = lines + (size_t(line) * 3 * size_t(c_y) + size_t(c));
    UNROLL for (int j = 0; j < 4; ++j) {
      if (c + j >= c_y) continue;
      to[j] = rows;
      to[c_y + j] = mean[j];
      to[2 * c_y + j] = squares[j];
    }
  }
};

// Of FOURS times four channels of a lane's rows, which are written as T.
template <typename T, int FOURS>
struct RowMoments {
  device float* lines;
  float rows[FOURS];
  float4 about[FOURS], sum[FOURS], squares[FOURS];

  METAL_FUNC RowMoments(device float* lines) thread : lines(lines) {
    UNROLL for (int f = 0; f < FOURS; ++f) {
      rows[f] = 0.0f;
      about[f] = sum[f] = squares[f] = float4(0.0f);
    }
  }

  // Adds a row's four channels.
  METAL_FUNC void add(int f, const thread float4& line) thread {
    float4 v;
    UNROLL for (int j = 0; j < 4; ++j) v[j] = float(T(line[j]));
    if (rows[f] == 0.0f) about[f] = v;
    const float4 d = v - about[f];
    sum[f] += d;
    squares[f] += d * d;
    rows[f] += 1.0f;
  }

  METAL_FUNC FourMoments whole(int f) const thread {
    const float4 d = sum[f] * (rows[f] > 0.0f ? 1.0f / rows[f] : 0.0f);
    FourMoments made;
    made.rows = rows[f];
    made.mean = about[f] + d;
    const float4 square = squares[f] - sum[f] * d;
    UNROLL for (int j = 0; j < 4; ++j)
      made.squares[j] = square[j] < 0.0f ? 0.0f : square[j];  // a NaN stays
    return made;
  }

  // Writes the line of a tile of COLUMNS from `column` on, of which GROUPS simdgroups
  // have WIDTH each; a lane's are those from 4 (lane % (WIDTH / 4)) on. All meet: what
  // they kept in the memory is done with.
  template <int COLUMNS, int WIDTH, int GROUPS>
  METAL_FUNC void write(
      threadgroup float* memory, int line, int column, int c_y, int simdgroup,
      int lane) const thread {
    FourMoments own = whole(0);
    UNROLL for (int bit = WIDTH / 4; bit < LANES; bit *= 2) own.join_lane(ushort(bit));
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (lane < WIDTH / 4) {
      threadgroup float* to = memory + (3 * WIDTH * simdgroup + 4 * lane);
      UNROLL for (int j = 0; j < 4; ++j) {
        to[j] = own.rows;
        to[WIDTH + j] = own.mean[j];
        to[2 * WIDTH + j] = own.squares[j];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int c = 4 * (LANES * simdgroup + lane);
    if (c >= COLUMNS) return;
    FourMoments all;
    UNROLL for (int g = 0; g < GROUPS; g += COLUMNS / WIDTH) {
      const threadgroup float* from =
          memory + (3 * WIDTH * (g + c / WIDTH) + c % WIDTH);
      float4 mean, squares;
      UNROLL for (int j = 0; j < 4; ++j) {
        mean[j] = from[WIDTH + j];
        squares[j] = from[2 * WIDTH + j];
      }
      all.join(from[0], mean, squares);
    }
    all.write(lines, line, column + c, c_y);
  }

  // Writes a line of a simdgroup alone, whose lanes have their rows by bits 1, 2 and 4;
  // each four of a lane is four channels after the one before, from `channel` on.
  METAL_FUNC void write(int line, int channel, int c_y, int lane) const thread {
    UNROLL for (int f = 0; f < FOURS; ++f) {
      FourMoments own = whole(f);
      own.join_lane(2);
      own.join_lane(4);
      own.join_lane(16);
      if ((lane & 22) == 0) own.write(lines, line, channel + 4 * f, c_y);
    }
  }
};
